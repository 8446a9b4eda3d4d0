"""Display names: layers in words, and long names shortened in the middle."""

from __future__ import annotations

from collections.abc import Sequence

from richter.core import WHOLE


def called(layer: str) -> str:
    """Return the display name of a layer."""
    return "whole model" if layer == WHOLE else layer.strip() or "(root)"


def shortened(name: str, most: int = 40) -> str:
    """Shorten a long name to its two ends, on one line."""
    name = " ".join(name.split())
    return name if len(name) <= most else f"{name[:most // 2 - 1]}…{name[-(most - most // 2):]}"


def short_names(layers: Sequence[str], most: int = 40) -> dict[str, str]:
    """Shorten names to fit: if one is too long, drop the beginning that all names share (``…0.attn.q``)."""
    inner = [k for k in layers if k != WHOLE]
    cut = 0
    if len(inner) > 1 and max(map(len, inner)) > most:
        parts = [k.split(".")[:-1] for k in inner]
        same = next((i for i, words in enumerate(zip(*parts, strict=False)) if len(set(words)) > 1), min(map(len, parts)))
        cut = sum(len(word) + 1 for word in parts[0][:same])
    return {k: shortened(called(k) if k == WHOLE or not cut else f"…{k[cut:]}", most) for k in layers}
