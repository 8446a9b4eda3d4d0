"""What a run should say of itself: versions, revision, hardware, the command; and settings, steps and names as plain data, which
refuses the rest in a sentence; and such records read back."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib.metadata
import itertools
import json
import operator
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from richter.core import StoreError

DEPTH = 100  # of settings within settings that are written,
DEEPEST = 400  # and of what is read: Python itself follows up to a thousand calls
HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # of characters: where one stands alone, no text can be made of it
PACKAGES = ("richter", "torch", "numpy", "transformers", "scikit-learn")


def provenance() -> dict[str, Any]:
    """Of this process, now."""
    return {"command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [], "python": platform.python_version(),
            "versions": versions(), "revision": revision(), "hardware": hardware(), "pid": os.getpid(), "host": platform.node()}


def versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def revision(folder: Path | None = None, *only: str) -> str | None:
    """The git revision of a folder (the working one), with + when files differ from it (``only``: these); None outside a
    repository."""
    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    return None if head is None else head + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", *only) else "")


def hardware() -> dict[str, Any]:
    """Processor, cores, memory, and the GPU if torch is at work and sees one. Never loads torch itself."""
    facts: dict[str, Any] = {"machine": platform.machine(), "processor": _processor(), "cores": os.cpu_count()}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def plain(settings: Any, where: str = "settings", depth: int = 0) -> Any:
    """A dataclass or mapping of settings as what JSON can hold; what it cannot is refused, not turned into text."""
    if depth > DEPTH:
        raise StoreError(f"{where[:60]}... is nested more than {DEPTH} deep, or holds itself. The record of a run cannot.")
    inside = partial(plain, depth=depth + 1)
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {f.name: inside(getattr(settings, f.name), f"{where}.{f.name}") for f in dataclasses.fields(settings)}
    if isinstance(settings, Mapping):
        record = {inside(str(k), f"a key of {where}"): inside(v, f"{where}[{k!r}]") for k, v in settings.items()}
        if len(record) < len(settings):
            raise StoreError(f"{where} has keys that are the same as text: {list(settings)}. A record keeps them as text.")
        return record
    if isinstance(settings, (set, frozenset)):
        return sorted((inside(v, f"{where}[{v!r}]") for v in settings), key=json.dumps)  # the order of a set is not its own
    if isinstance(settings, (list, tuple)):
        return [inside(v, f"{where}[{i}]") for i, v in enumerate(settings)]
    if isinstance(settings, enum.Enum):
        return plain(settings.value, where)
    if isinstance(settings, (str, Path)):
        if not _is_utf8(text := str.__str__(settings) if isinstance(settings, str) else str(settings)):
            raise StoreError(f"{where} is {text!r}, which holds what is no character of UTF-8. The record of a run cannot.")
        return text
    if settings is None or isinstance(settings, (bool, int, float)):
        return settings
    if hasattr(settings, "item") and getattr(settings, "ndim", -1) == 0:  # a number of numpy or torch
        return plain(settings.item(), where)
    if isinstance(settings, argparse.Namespace):
        return plain(vars(settings), where)
    raise StoreError(f"{where} is a {type(settings).__name__}, which cannot be kept in the record of a run. Settings are "
                     f"numbers, texts, lists and dataclasses of them.")


def parsed(text: Any) -> Any:
    """The record that a run of unknown origin holds as text; none that whoever works with it could not."""
    try:
        value = json.loads(text)
        if HALVES.search(text):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, TypeError, RecursionError) as why:
        raise StoreError(f"a record of this run is damaged: {why}.") from why
    level, depth = [value], 0
    while level:
        inside = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        level, depth = list(itertools.chain.from_iterable(inside)), depth + 1
        if depth > DEEPEST:
            raise StoreError(f"a record of this run is damaged: it is nested more than {DEEPEST} deep.")
    return value


def worded(error: BaseException) -> str:
    """An error in one line, whatever its class makes of ``str``."""
    try:
        text = str(error)
    except Exception as why:
        text = f"(its text could not be made: {type(why).__name__})"
    return f"{type(error).__name__}: {text}"


def whole_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise StoreError(f"step={step!r}: what is written to a run has a whole number as its step.") from None
    if not -2 ** 63 <= number < 2 ** 63:
        raise StoreError(f"step={step!r}: a step has at most 64 bits.")
    return number


def plain_text(text: Any) -> str:
    """Of exactly the class ``str``, so that it is the same when it is read."""
    if not isinstance(text, str) or not _is_utf8(text):
        raise StoreError(f"{text!r}: names and notes of a run are text, of characters that UTF-8 has.")
    return str.__str__(text)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
