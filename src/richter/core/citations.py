"""How to cite what was used: the papers behind measures, experiments and theories, by their short names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from richter.core.values import unknown


@cache
def references() -> dict[str, dict[str, Any]]:
    """Every paper by its short name: title, authors, year, venue, bibtex."""
    return dict(json.loads(Path(__file__).with_name("references.json").read_text(encoding="utf-8")))


def reference(name: str) -> dict[str, Any]:
    if name not in references():
        raise unknown("the list of references", "paper", name, references())
    return references()[name]


def bibtex(names: Iterable[str]) -> str:
    """The BibTeX of some papers, each once."""
    return "\n\n".join(reference(name)["bibtex"] for name in dict.fromkeys(names))
