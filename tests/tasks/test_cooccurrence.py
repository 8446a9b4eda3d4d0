"""Counts of words and pairs: against loops over the text, interrupted and resumed, in several processes, of bad files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from richter.core import DataError, SelectionError
from richter.tasks import cooccurrence
from richter.tasks.cooccurrence import Counts, count, load, save, tokens

TEXT = """The cat's paw; the DOG, the dog!
don't stop. Caf\u00e9 \u2014 na\u00efve \u201cquotes\u201d, it\u2019s 1999_2000

the cat sat
"""


def slow_words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower().replace("'", "").replace("\u2019", ""))


def slow_count(texts: list[str], vocabulary: int, window: int, least: int = 1) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The definition: a loop over all pairs of positions."""
    found = [slow_words(text) for text in texts]
    ranked = sorted(Counter(w for words in found for w in words).items(), key=lambda pair: (-pair[1], pair[0]))
    names = [w for w, n in ranked[:vocabulary] if n >= least]
    C = np.zeros((len(names), len(names)), dtype=int)
    for words in found:
        inside = [names.index(w) for w in words if w in names]
        for p, i in enumerate(inside):
            for q, j in enumerate(inside):
                if 0 < abs(p - q) <= window:
                    C[i, j] += window + 1 - abs(p - q)
    return names, np.array([n for w, n in ranked[:vocabulary] if n >= least]), C


def full(counts: Counts) -> np.ndarray:
    U = counts.pairs.toarray()
    assert (np.tril(U, -1) == 0).all()
    return U + np.triu(U, 1).T


def agree(counts: Counts, texts: list[str], vocabulary: int, window: int, least: int = 1) -> None:
    names, frequency, C = slow_count(texts, vocabulary, window, least)
    assert list(counts.words) == names
    assert counts.frequency.tolist() == frequency.tolist()
    assert full(counts).tolist() == C.tolist()
    assert counts.left_out + counts.frequency.sum() == sum(len(slow_words(text)) for text in texts)
    np.testing.assert_allclose(counts.joint.toarray(), C / C.sum(), rtol=1e-14)
    np.testing.assert_allclose(counts.unigram, frequency / frequency.sum())


def test_words_of_a_text(tmp_path: Path) -> None:
    words = [w.decode() for w in tokens(TEXT.encode())]
    assert words == slow_words(TEXT)
    assert words[:4] == ["the", "cats", "paw", "the"]
    assert {"dont", "caf\u00e9", "na\u00efve", "its", "1999", "2000"} <= set(words)
    assert tokens(b"\xef\xbb\xbfa b\r\nc", lines=True) == [b"a", b"b", b"\0", b"c"]
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    agree(count(path, window=3), [TEXT], 10_000, 3)
    agree(count(path, window=3, lines=True), TEXT.split("\n"), 10_000, 3)
    agree(count(path, window=2, vocabulary=3), [TEXT], 3, 2)
    agree(count(path, window=2, least=2), [TEXT], 100, 2, 2)
    agree(count([path, path], window=40), [TEXT, TEXT], 10_000, 40)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), window=st.integers(1, 5), lines=st.booleans(), chunk=st.sampled_from([1, 3, 50]),
       piece=st.sampled_from([1, 17, 500]), rows=st.sampled_from([1, 20, 1_000]))
def test_the_sizes_of_pieces_blocks_and_chunks_change_nothing(
        seed: int, window: int, lines: bool, chunk: int, piece: int, rows: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    draw = np.random.default_rng(seed)
    texts = [" ".join(f"w{i}" for i in np.minimum(draw.geometric(0.3, draw.integers(0, 40)), 8)) for _ in range(6)]
    files = [tmp_path_factory.mktemp("texts") / "a.txt" for _ in range(2)]
    files[0].write_text("\n".join(texts[:3]))
    files[1].write_text("\n".join(texts[3:]) + "\n")
    if len({w for text in texts for w in text.split()}) < 3:
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CHUNK", chunk), ("PIECE", piece), ("ROWS", rows)):
            patch.setattr(cooccurrence, name, value)
        counts = count(files, vocabulary=5, window=window, lines=lines)
    agree(counts, texts if lines else [" ".join(texts[:3]), " ".join(texts[3:])], 5, window)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(" ".join(f"w{i}" for i in draw.zipf(1.4, 30) % 60) for _ in range(300)))
    return path


def test_an_interrupted_count_is_resumed_with_the_same_numbers(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    """It is killed at every file in turn; what was made is not made again, and at the end only the result is kept."""
    monkeypatch.setattr(cooccurrence, "PIECE", 4_000)
    monkeypatch.setattr(cooccurrence, "ROWS", 2_000)
    whole = count(corpus, window=4)
    write, store, folder = cooccurrence._write, cooccurrence._store, tmp_path / "counts"
    left = 0

    class Killed(BaseException):
        pass

    def failing(path: Path, *given: object, **arrays: object) -> None:
        nonlocal left
        if left == 0:
            path.with_name(f"{path.name}.part").write_bytes(b"half of it")
            raise Killed
        left -= 1
        (write(path, **arrays) if arrays else store(path, *given))  # type: ignore[arg-type]

    monkeypatch.setattr(cooccurrence, "_write", failing)
    monkeypatch.setattr(cooccurrence, "_store", failing)
    kills = 0
    while True:
        left = 1 + kills % 4  # so many more files
        try:
            resumed = count(corpus, window=4, folder=folder)
            break
        except Killed:
            kills += 1
    assert kills > 7
    assert resumed.pairs.nnz == whole.pairs.nnz
    for name in ("data", "indices", "indptr"):
        assert np.array_equal(getattr(resumed.pairs, name), getattr(whole.pairs, name))
    assert (resumed.words, resumed.left_out) == (whole.words, whole.left_out)
    (inside,) = folder.iterdir()
    assert {p.name for p in inside.iterdir()} == {"settings.json", "counts.npz"}
    monkeypatch.setattr(cooccurrence, "_write", None)  # read again, not counted
    assert np.array_equal(count(corpus, window=4, folder=folder).pairs.data, whole.pairs.data)
    monkeypatch.setattr(cooccurrence, "_write", write)
    monkeypatch.setattr(cooccurrence, "_store", store)
    corpus.write_text(corpus.read_text() + "\nw1 w2 w3")  # another text has other counts
    assert count(corpus, window=4, folder=folder).pairs.sum() > whole.pairs.sum()


def test_a_killed_process_and_several_workers(corpus: Path, tmp_path: Path) -> None:
    """A process that kills itself in the middle, then one with two workers."""
    whole, folder = count(corpus, window=4), tmp_path / "counts"
    script = (f"import os, signal\nfrom richter.tasks import cooccurrence as c\nc.PIECE, c.ROWS = 4000, 2000\n"
              f"once = c._count_rows\nseen = []\n"
              f"def dying(*a):\n    seen.append(a)\n    len(seen) > 2 and os.kill(os.getpid(), signal.SIGKILL)\n    once(*a)\n"
              f"KILL = c._count_rows\n"
              f"if __name__ == '__main__':\n    import sys\n    c._count_rows = dying if sys.argv[1] == '1' else once\n"
              f"    c.count({str(corpus)!r}, window=4, folder={str(folder)!r}, workers=int(sys.argv[1]))\n")
    (tmp_path / "work.py").write_text(script)
    assert subprocess.run([sys.executable, tmp_path / "work.py", "1"]).returncode == -9
    (inside,) = folder.iterdir()
    assert len(list(inside.glob("rows-*.npz"))) == 2
    subprocess.run([sys.executable, tmp_path / "work.py", "2"], check=True)
    resumed = load(inside / "counts.npz")
    assert np.array_equal(resumed.pairs.toarray(), whole.pairs.toarray())
    assert resumed.words == whole.words


def test_counts_are_kept_in_a_file(corpus: Path, tmp_path: Path) -> None:
    counts = count(corpus, window=4)
    save(counts, tmp_path / "x.npz")
    again = load(tmp_path / "x.npz")
    assert again.words == counts.words
    assert np.array_equal(full(again), full(counts))
    small = counts.first(7)
    assert np.array_equal(full(small), full(counts)[:7, :7])
    assert small.left_out == counts.frequency[7:].sum()
    with pytest.raises(SelectionError, match="2 or more"):
        counts.first(1)
    assert counts.index(counts.words[5]) == 5
    with pytest.raises(SelectionError, match=r"has no word 'w1x'\. Close to it: 'w1"):
        counts.index("w1x")
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:300])
    with pytest.raises(DataError, match=r"holds no counts of words .* Delete it and count again"):
        load(tmp_path / "x.npz")


@pytest.mark.parametrize(("data", "options", "words"), [
    (b"", {}, "the files hold no words: they are empty"),
    (b" .,;\n", {}, "have neither letters nor digits"),
    (b"one one one", {}, "has the one word 'one'.*Give more text."),
    (b"one one two", {"least": 2}, "smaller least .--least. than 2"),
    (b"one two three", {"least": 2}, "no word occurs 2 times: the vocabulary is empty.*'one', occurs 1 times"),
    (b"caf\xe9 au lait", {}, "is not in UTF-8: byte 3 is 0xe9.*iconv -f latin1"),
    (b"\x7fELF\0\0\1", {}, r"holds a zero byte \(byte 4\): it is a binary file"),
    ("two words".encode("utf-16"), {}, "UTF-16 looks so"),
    (b"one\ntwo\n", {"lines": True}, "every line has one word at most"),
    (b"x" * 200, {"piece": 50, "head": 20}, "20 bytes without a space or the end of a line, from byte 50"),
])
def test_bad_files_say_what_to_do(data: bytes, options: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                  ) -> None:
    for name in ("piece", "head"):
        if name in options:
            monkeypatch.setattr(cooccurrence, name.upper(), options.pop(name))
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=words):
        count(path, **options)


def test_bad_arguments_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="no file was given"):
        count([])
    with pytest.raises(DataError, match=r"is a folder.*Give its files"):
        count(tmp_path)
    with pytest.raises(DataError, match=r"is not a regular file.*Is its name right"):
        count(tmp_path / "missing.txt")
    with pytest.raises(SelectionError, match="vocabulary=1: a whole number, at least 2"):
        count(tmp_path, vocabulary=1)
