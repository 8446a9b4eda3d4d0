"""Counts of the corpora of these experiments."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from richter import tasks
from richter.tasks.cooccurrence import Counts, count


@functools.cache
def counts_of(name: str, vocabulary: int, window: int = 16) -> Counts:
    """Count a corpus of `richter.tasks.corpus`: reviews are texts of their own, the verses of a book follow each other."""
    texts = tasks.corpus(name).texts
    with tempfile.TemporaryDirectory(prefix="richter-words-") as folder:
        path = Path(folder) / "text.txt"
        path.write_text("\n".join(t.replace("<br />", " ").replace("\n", " ") for t in texts), encoding="utf-8")
        return count(path, vocabulary=vocabulary, window=window, lines=name == "imdb")
