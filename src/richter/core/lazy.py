"""Names of a package that are imported when they are first used, so that ``import richter`` is immediate."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(package: str, names: Mapping[str, str], parts: Iterable[str] = ()
               ) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__, __dir__, __all__ = lazy_names(__name__, {"Probe": "instrument.probe"}, ("kernels",))``: names and the
    modules below the package that define them, and submodules by themselves."""
    parts = tuple(parts)
    everything = [*names, *parts]

    def get(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        if name in parts:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *everything})

    return get, listed, everything
