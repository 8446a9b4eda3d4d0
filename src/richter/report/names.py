"""Names as pictures and tables show them: layers in words, long names by their two ends."""

from __future__ import annotations

from collections.abc import Sequence

from richter.core import WHOLE


def called(layer: str) -> str:
    """A layer as people say it."""
    return "whole model" if layer == WHOLE else layer.strip() or "(no name)"


def shortened(name: str, most: int = 40) -> str:
    """The two ends of a long name, on one line."""
    name = " ".join(name.split())
    return name if len(name) <= most else f"{name[:most // 2 - 1]}…{name[-(most - most // 2):]}"


def short_names(layers: Sequence[str], most: int = 40) -> dict[str, str]:
    """Names that fit: where one is too long, without the beginning that all have in common (``…0.attn.q``)."""
    inner = [k for k in layers if k != WHOLE]
    cut = 0
    if len(inner) > 1 and max(map(len, inner)) > most:
        parts = [k.split(".")[:-1] for k in inner]
        same = next((i for i, words in enumerate(zip(*parts, strict=False)) if len(set(words)) > 1), min(map(len, parts)))
        cut = sum(len(word) + 1 for word in parts[0][:same])
    return {k: shortened(called(k) if k == WHOLE or not cut else f"…{k[cut:]}", most) for k in layers}
