"""Text: Shakespeare as characters, reviews and verses, and lists for the evaluation of word vectors."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from richter.core import DataError, SelectionError
from richter.tasks.store import need


@dataclass(frozen=True, eq=False)
class Characters:
    """A text as ids of its characters: ``ids`` [n] for training; ``ids_test``, the end of the text, for testing."""

    ids: Tensor
    ids_test: Tensor
    vocabulary: str  # character i has the id i

    def encode(self, text: str) -> Tensor:
        """Return ids [n] of the characters of a text."""
        unknown = sorted(set(text) - set(self.vocabulary))
        if unknown:
            raise DataError(f"the characters {''.join(unknown)!r} are not in the vocabulary {self.vocabulary!r}.")
        return torch.tensor([self.vocabulary.index(c) for c in text], dtype=torch.long)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of ids [n]."""
        return "".join(self.vocabulary[int(i)] for i in ids)

    def batch(self, n: int, length: int, draw: torch.Generator, test: bool = False) -> tuple[Tensor, Tensor]:
        """Draw n random windows [n,length], with their continuations shifted by one [n,length]."""
        ids = self.ids_test if test else self.ids
        if not 1 <= length < len(ids):
            raise SelectionError(f"length={length}: between 1 and {len(ids) - 1} characters can be given.")
        start = torch.randint(len(ids) - length, (n, 1), generator=draw, device=draw.device).cpu()
        windows = ids[start + torch.arange(length + 1)]
        return windows[:, :-1], windows[:, 1:]


class Corpus(NamedTuple):
    """Texts with one class id each, and the names of the classes."""

    texts: tuple[str, ...]
    y: Tensor
    classes: tuple[str, ...]


class Analogies(NamedTuple):
    """Google's analogy questions (section, a, b, c, d: a is to b as c is to d), and pairs of words with human similarity
    ratings."""

    questions: tuple[tuple[str, str, str, str, str], ...]
    wordsim353: tuple[tuple[str, str, float], ...]
    simlex999: tuple[tuple[str, str, float], ...]


def shakespeare(size: int = 1_100_000, test: float = 0.1) -> Characters:
    """Load the first ``size`` characters of the works in modern spelling, in the order of their file names. The last share
    ``test`` is for testing."""
    text = "".join(_read("shakespeare", path.name) for path in sorted(need("shakespeare").glob("*_gut.txt")))
    if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= len(text) or not 0 < test < 1:
        raise SelectionError(f"shakespeare(size={size!r}, test={test!r}): size is between 2 and {len(text):,} characters, test a "
                             f"share between 0 and 1.")
    codes = np.frombuffer(text[:size].encode("ascii"), np.uint8)
    present, ids = np.unique(codes, return_inverse=True)
    cut = min(size - 1, max(1, round(size * (1 - test))))
    both = torch.from_numpy(ids.reshape(-1).astype(np.int64))
    return Characters(both[:cut], both[cut:], present.tobytes().decode("ascii"))


def corpus(name: str, seed: int = 0) -> Corpus:
    """Load a corpus. "imdb": the distinct film reviews (negative 0, positive 1), shuffled by ``seed``, so that any cut is a fair
    split. "kjv": the verses of the King James Bible in order, with their books as classes."""
    if name == "imdb":
        reviews = _json("imdb", "reviews.json")
        try:
            distinct = {str(review["t"]): int(review["s"]) for review in reviews}
        except (TypeError, KeyError, ValueError) as error:
            raise _damaged("imdb", "reviews.json", error) from error
        texts = list(distinct)
        order = np.random.default_rng(seed).permutation(len(texts))
        y = torch.tensor([distinct[texts[i]] for i in order])
        return Corpus(tuple(texts[i] for i in order), y, ("negative", "positive"))
    if name == "kjv":
        verses = _json("kjv", "verses-1769.json")
        try:
            books = [place.rpartition(" ")[0] for place in verses]
            texts = [str(verse) for verse in verses.values()]
        except AttributeError as error:
            raise _damaged("kjv", "verses-1769.json", error) from error
        classes = tuple(dict.fromkeys(books))
        number = {book: i for i, book in enumerate(classes)}
        return Corpus(tuple(texts), torch.tensor([number[book] for book in books]), classes)
    raise SelectionError(f"there is no corpus {name!r}; there are 'imdb' and 'kjv' (and richter.tasks.shakespeare).")


def analogies() -> Analogies:
    """Load 19,544 analogy questions of Google in 14 sections, WordSim-353 and SimLex-999."""
    questions: list[tuple[str, str, str, str, str]] = []
    section = ""
    for line in _read("analogies", "questions-words.txt").splitlines():
        words = line.split()
        if words[:1] == [":"]:
            section = " ".join(words[1:])
        elif len(words) == 4:
            questions.append((section, words[0], words[1], words[2], words[3]))
        elif words:
            raise _damaged("analogies", "questions-words.txt", f"the line {line!r}")
    return Analogies(tuple(questions), _pairs("wordsim353.tsv"), _pairs("simlex999.txt"))


def _pairs(file: str) -> tuple[tuple[str, str, float], ...]:
    """Pairs of words and their similarity."""
    text = _read("analogies", file)
    try:
        frame = pd.read_csv(io.StringIO(text), sep="\t", comment="#", header=None, usecols=[0, 1, 2], dtype=str, na_filter=False,
                            quoting=csv.QUOTE_NONE)
        return tuple((a, b, float(likeness)) for a, b, likeness in frame.itertuples(index=False, name=None))
    except ValueError as error:
        raise _damaged("analogies", file, error) from error


def _read(name: str, file: str) -> str:
    """Text of a file of a data set; raise an error if it is damaged."""
    try:
        return (need(name) / file).read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError, PermissionError) as error:
        raise _damaged(name, file, error) from error


def _json(name: str, file: str) -> Any:
    """Contents of a JSON file of a data set."""
    try:
        return json.loads(_read(name, file))
    except json.JSONDecodeError as error:
        raise _damaged(name, file, error) from error


def _damaged(name: str, file: str, error: object) -> DataError:
    """Make the error for a damaged file."""
    return DataError(f"{file} of {name} is damaged ({error}). Run `richter data fetch {name}`: it is checked and replaced.")


TASKS: tuple = (shakespeare, corpus, analogies)
