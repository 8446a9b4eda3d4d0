"""Counts of words and of pairs of words in text files: streamed, in several processes, resumable.

    counts = count(["reviews.txt"], vocabulary=10_000, lines=True, folder="counts")
    counts.words, counts.frequency            # the most frequent words first
    counts.joint, counts.unigram              # probabilities of pairs (sparse, symmetric) and of words

A word is a run of letters and digits, in lower case; apostrophes are dropped ("don't" is "dont"). Words outside the vocabulary
are taken out first, as word2vec does. A pair of words at a distance of at most ``window`` counts ``window`` + 1 - distance, on
both sides. All counts are whole numbers, so a count that was interrupted and resumed ends with the same numbers.

The work has three steps. Pieces of the files become numbers of words; these are joined into one array on disk, with the positions
of each word; blocks of rows of the matrix of pairs are then counted one by one, as products of a sparse matrix of positions and
one of neighbours. Each piece and each block is one file of the folder, and is not made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy import sparse

from richter.core import DataError, SelectionError
from richter.core.values import progress

PIECE = 1 << 23  # bytes of text that are read at a time
ROWS = 1 << 22  # occurrences of words that are counted into one file
CHUNK = 1 << 18  # occurrences whose neighbours are in memory at a time
HEAD = 1 << 16  # bytes of a file in which there must be a space
WORD = re.compile(r"[^\W_]+")
KEPT = bytes(c if chr(c).isalnum() or c >= 128 or c == 0 else 32 for c in range(256))  # 0 marks the end of a text
END = b"\0"
EDITION = 1  # of the files in the folder

Path_ = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Counts:
    """Words, most frequent first, how often each occurs, and the weighted counts of pairs: ``pairs`` [V, V] is upper triangular,
    and its entry (i, j) counts both orders."""

    words: tuple[str, ...]
    frequency: Int[np.ndarray, " V"]
    pairs: sparse.csr_array
    window: int
    left_out: int  # occurrences of words outside the vocabulary

    @property
    def unigram(self) -> Float[np.ndarray, " V"]:
        """Probabilities of words."""
        return self.frequency / self.frequency.sum()

    @cached_property
    def joint(self) -> sparse.csr_array:
        """Probabilities of pairs [V, V]: symmetric, with sum 1."""
        diagonal = sparse.dia_array((self.pairs.diagonal()[None], [0]), self.pairs.shape)
        both = sparse.csr_array(self.pairs + self.pairs.T - diagonal)
        return sparse.csr_array(both / both.sum())

    def index(self, word: str) -> int:
        """Return the number of a word; an error says which words are close to it."""
        if (i := self._numbers.get(word)) is None:
            from richter.core import unknown
            raise unknown(f"the vocabulary of {len(self.words):,} words", "word", word, self.words)
        return i

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def first(self, size: int) -> Counts:
        """Return the counts of the ``size`` most frequent words among themselves, at their distances in the larger vocabulary."""
        if not 2 <= size <= len(self.words):
            raise SelectionError(f"the first {size} words of {len(self.words):,}: take 2 or more, and no more than there are.")
        rest = int(self.frequency[size:].sum())
        return Counts(self.words[:size], self.frequency[:size], sparse.csr_array(self.pairs[:size, :size]), self.window,
                      self.left_out + rest)


def count(files: Sequence[Path_] | Path_, *, vocabulary: int = 10_000, window: int = 16, least: int = 1, lines: bool = False,
          folder: Path_ | None = None, workers: int = 1) -> Counts:
    """Count words and pairs in text files in UTF-8.

    The vocabulary has the ``vocabulary`` most frequent words that occur ``least`` times or more; of equally frequent ones, the
    first in alphabetical order. Pairs do not cross the ends of files, nor those of lines if ``lines`` is true: each line is then
    a text of its own. ``folder``: where unfinished counts are kept and resumed, and finished ones read again; by default nothing
    is kept. ``workers``: processes. More than one need a script whose work is under ``if __name__ == "__main__":``.
    """
    for name, value, low in (("vocabulary", vocabulary, 2), ("window", window, 1), ("least", least, 1), ("workers", workers, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise SelectionError(f"{name}={value!r}: a whole number, at least {low}, is needed.")
    paths = _checked([files] if isinstance(files, (str, os.PathLike)) else list(files))
    key = {"edition": [EDITION, PIECE, ROWS], "vocabulary": vocabulary, "window": window, "least": least, "lines": lines,
           "files": [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in paths]}
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="richter-words-") as place:
            return _counted(paths, Path(place), workers, vocabulary, window, least, lines)
    kept = Path(folder) / digest
    if (done := kept / "counts.npz").is_file():
        return load(done)
    kept.mkdir(parents=True, exist_ok=True)
    (kept / "settings.json").write_text(json.dumps(key, indent=1), encoding="utf-8")
    counts = _counted(paths, kept, workers, vocabulary, window, least, lines)
    save(counts, done)
    for path in kept.iterdir():  # only the result stays
        if path.name not in ("counts.npz", "settings.json"):
            path.unlink(missing_ok=True)
    return counts


def save(counts: Counts, path: Path_) -> None:
    """Write counts into one .npz file."""
    _write(Path(path), words=_packed(list(counts.words)), frequency=counts.frequency, data=counts.pairs.data,
           indices=counts.pairs.indices, indptr=counts.pairs.indptr, rest=np.array([counts.window, counts.left_out]))


def load(path: Path_) -> Counts:
    """Read counts that ``save`` wrote; nothing in the file is executed."""
    try:
        with np.load(path, allow_pickle=False) as held:
            words = tuple(_unpacked(held["words"]))
            size = len(words)
            pairs = sparse.csr_array((held["data"], held["indices"], held["indptr"]), (size, size))
            pairs.check_format(full_check=True)
            window, left_out = held["rest"].tolist()
            if held["frequency"].shape != (size,):
                raise ValueError(f"{held['frequency'].shape} frequencies for {size} words")
            return Counts(words, held["frequency"], pairs, window, left_out)
    except Exception as error:  # any error that a damaged file can cause
        raise DataError(f"{path} holds no counts of words ({type(error).__name__}: {error}): it is damaged, or something else. "
                        f"Delete it and count again.") from error


def _checked(paths: Sequence[Path_]) -> list[Path]:
    if not paths:
        raise SelectionError("no file was given: words are counted in text files.")
    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}: words are counted in text files."
                            + (f" Give its files, for example {path}/*.txt." if path.is_dir() else " Is its name right?"))
    return [Path(path) for path in paths]


def _counted(paths: list[Path], place: Path, workers: int, vocabulary: int, window: int, least: int, lines: bool) -> Counts:
    """Count the words, then the pairs, in parallel and resumable in the folder ``place``."""
    pieces = [(i, *piece) for i, piece in enumerate(p for path in paths for p in _pieces(path))]
    _each(_read_piece, [(place, i, path, start, end, lines) for i, path, start, end in pieces], workers, "reading",
          [end - start for *_, start, end in pieces])
    words, frequency, left_out = _vocabulary(place, len(pieces), vocabulary, least)
    last = [following[2] == 0 for following in pieces[1:]] + [True]
    _join(place, words, last, window)
    ends = np.concatenate([[0], np.cumsum(frequency)])
    blocks = list(_blocks(frequency))
    _each(_count_rows, [(place, low, high, window) for low, high in blocks], workers, "counting pairs",
          [int(ends[high] - ends[low]) for low, high in blocks])
    pairs = _gathered(place, blocks, len(words))
    if not pairs.nnz:
        raise DataError("no two words of the vocabulary occur near each other, so there is nothing to learn: every line has "
                        "one word at most. Count without lines=True (--lines), if lines are not texts of their own.")
    return Counts(words, frequency, pairs, window, left_out)


def _each(work: Callable[..., None], tasks: list[tuple[Any, ...]], workers: int, title: str, sizes: list[int]) -> None:
    """Do all tasks, in this process or in several, with a bar over their sizes."""
    with progress(total=sum(sizes), title=title, unit="", unit_scale=True) as bar:
        if workers == 1 or len(tasks) == 1:
            for task, size in zip(tasks, sizes, strict=True):
                work(*task)
                bar.update(size)
            return
        # a fresh interpreter for each worker: a fork of a process with threads may hang
        with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(work, *task): size for task, size in zip(tasks, sizes, strict=True)}
            try:
                for future in as_completed(futures):
                    future.result()
                    bar.update(futures[future])
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


# ------------------------------------------------------------------------------------------------ from text to numbers


def _pieces(path: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield ranges of bytes of a file, each of which ends behind a line or, in a longer line, behind a word."""
    size, start = path.stat().st_size, 0
    with path.open("rb") as file:
        while start < size:
            end = min(size, start + PIECE)
            if end < size:
                file.seek(end)
                head = file.read(HEAD)
                cut = head.find(b"\n")
                cut = head.find(b" ") if cut < 0 else cut
                if cut < 0 and len(head) == HEAD:
                    raise DataError(f"{path} has {HEAD:,} bytes without a space or the end of a line, from byte {end:,}: words "
                                    f"in it cannot be told apart. Is it a text in a language with spaces between words?")
                end = end + cut + 1 if cut >= 0 else size
            yield path, start, end
            start = end


def _read_piece(place: Path, number: int, path: Path, start: int, end: int, lines: bool) -> None:
    """Write the words of a piece and their numbers, unless an earlier count did."""
    out = place / f"piece-{number:05d}.npz"
    if out.is_file():
        return
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(end - start)
    found = tokens(data, lines, f"{path}", start)
    numbers = {word: i for i, word in enumerate(dict.fromkeys(chain([END], found)))}
    ids = np.fromiter(map(numbers.__getitem__, found), np.int32, len(found))
    _write(out, ids=ids, words=_packed([word.decode() for word in list(numbers)[1:]]),
           counts=np.bincount(ids, minlength=len(numbers)))


def tokens(data: bytes, lines: bool = False, name: str = "the text", start: int = 0) -> list[bytes]:
    """Return the words of a text in UTF-8, as bytes; with ``lines``, a zero byte after each line. ``name`` and ``start`` (the
    number of its first byte) are for messages."""
    data = data.removeprefix(b"\xef\xbb\xbf") if start == 0 else data
    if (zero := data.find(0)) >= 0:
        wide = " UTF-16 looks so: convert it with iconv -f utf-16 -t utf-8." if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise DataError(f"{name} holds a zero byte (byte {start + zero:,}): it is a binary file, no text, and words in it would "
                        f"be noise.{wide} Leave it out, or extract its text first.")
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is not in UTF-8: byte {start + error.start:,} is {data[error.start]:#04x}. Its words would "
                            f"be broken. Convert it, for example with iconv -f latin1 -t utf-8.") from error
        data = b"\n".join(line if line.isascii() else _plain(line.decode()) for line in data.split(b"\n"))
    if lines:
        data = data.replace(b"\n", b" \0 ")
    return data.lower().translate(KEPT, b"'").split()


def _plain(line: str) -> bytes:
    """Words of a line with other characters than ASCII, with spaces between."""
    return " ".join(WORD.findall(line.lower().replace("'", "").replace("\u2019", ""))).encode()


def _vocabulary(place: Path, pieces: int, size: int, least: int) -> tuple[tuple[str, ...], NDArray[np.int64], int]:
    total: Counter[str] = Counter()
    for number in progress(range(pieces), title="vocabulary", unit="piece"):
        with np.load(place / f"piece-{number:05d}.npz", allow_pickle=False) as held:
            total.update(dict(zip(_unpacked(held["words"]), held["counts"][1:].tolist(), strict=True)))
    ranked = sorted(total.items(), key=lambda pair: (-pair[1], pair[0]))
    kept = [(word, times) for word, times in ranked[:size] if times >= least]
    if not ranked:
        raise DataError("the files hold no words: they are empty, or have neither letters nor digits. Give files with text.")
    if not kept:
        raise DataError(f"no word occurs {least} times: the vocabulary is empty. The most frequent word, {ranked[0][0]!r}, "
                        f"occurs {ranked[0][1]} times; give a smaller least (--least).")
    if len(kept) == 1:
        raise DataError(f"the vocabulary has the one word {kept[0][0]!r}: embeddings are learned from how often different words "
                        f"occur together, so two or more are needed. Give more text"
                        + ("." if len(ranked) == 1 else f", or a smaller least (--least) than {least}."))
    frequency = np.array([times for _, times in kept], dtype=np.int64)
    return tuple(word for word, _ in kept), frequency, total.total() - int(frequency.sum())


def _join(place: Path, words: tuple[str, ...], last: list[bool], window: int) -> None:
    """Write the numbers of all words in the vocabulary one after the other, with gaps between texts, and where each occurs."""
    if (place / "positions.npy").is_file():
        return
    size, numbers = len(words), {word: i for i, word in enumerate(words)}
    gap = np.full(window, size, np.int32)
    with (place / "ids.part").open("wb") as out:
        gap.tofile(out)
        for number, at_end in enumerate(last):
            with np.load(place / f"piece-{number:05d}.npz", allow_pickle=False) as held:
                own = [numbers.get(word, -1) for word in _unpacked(held["words"])]
                ids = np.array([size, *own], np.int32)[held["ids"]]
            ids = ids[ids >= 0]
            np.repeat(ids, np.where(ids == size, window, 1)).tofile(out)
            if at_end:
                gap.tofile(out)
        gap.tofile(out)
    ids = np.fromfile(place / "ids.part", np.int32)
    wide = np.int64 if len(ids) >= 2**31 else np.int32
    # the transpose of a sparse matrix with one entry in each row sorts in linear time
    rows = sparse.csr_array((np.ones(len(ids), np.int8), ids, np.arange(len(ids) + 1, dtype=wide)), shape=(len(ids), size + 1))
    columns = rows.tocsc()
    _store(place / "ids.npy", ids)
    _store(place / "starts.npy", columns.indptr[:size + 1].astype(np.int64))
    _store(place / "positions.npy", columns.indices[:columns.indptr[size]])
    (place / "ids.part").unlink()


# ------------------------------------------------------------------------------------------------ from numbers to pairs


def _blocks(frequency: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of words that occur about ROWS times together; a more frequent word is alone."""
    low, held = 0, 0
    for i, times in enumerate(frequency.tolist()):
        if held and held + times > ROWS:
            yield low, i
            low, held = i, 0
        held += times
    yield low, len(frequency)


def _count_rows(place: Path, low: int, high: int, window: int) -> None:
    """Write the rows ``low`` to ``high`` of the matrix of pairs, unless an earlier count did."""
    out = place / f"rows-{low:07d}.npz"
    if out.is_file():
        return
    ids, positions = (np.load(place / name, mmap_mode="r") for name in ("ids.npy", "positions.npy"))
    starts = np.load(place / "starts.npy")
    size = len(starts) - 1
    around = np.lib.stride_tricks.sliding_window_view(ids, 2 * window + 1)
    distance = np.abs(np.arange(-window, window + 1))
    weights = np.tile((window + 1 - distance).astype(np.int32), CHUNK)
    pointers = np.arange(0, len(weights) + 1, 2 * window + 1, dtype=np.int32)
    parts, first = [], low
    while first < high:
        # as many words as fit a chunk; of a more frequent word, one chunk after the other
        last = max(first + 1, min(high, int(np.searchsorted(starts, starts[first] + CHUNK, side="right")) - 1))
        rows = sparse.csr_array((last - first, size + 1), dtype=np.int64)
        for begin in range(int(starts[first]), int(starts[last]), CHUNK):
            end = min(begin + CHUNK, int(starts[last]))
            places = positions[begin:end]
            near = around[places - window]
            near[:, window] = size  # the word itself
            np.putmask(near, near < ids[places][:, None], size)  # the lower triangle
            near, m = near.reshape(-1), end - begin
            neighbours = sparse.csr_array((weights[:len(near)], near, pointers[:m + 1]), shape=(m, size + 1))
            ends = np.clip(starts[first:last + 1], begin, end) - begin
            occurs = sparse.csr_array((np.ones(m, np.int32), np.arange(m, dtype=np.int32), ends.astype(np.int32)),
                                      shape=(last - first, m))
            here = occurs @ neighbours
            rows = here.astype(np.int64) if rows.nnz == 0 else rows + here
        parts.append(sparse.csr_array(rows[:, :size]))
        first = last
    block = sparse.vstack(parts, format="csr") if len(parts) > 1 else parts[0]
    block.sort_indices()
    _write(out, data=block.data, indices=block.indices.astype(np.int32), indptr=block.indptr.astype(np.int64))


def _gathered(place: Path, blocks: list[tuple[int, int]], size: int) -> sparse.csr_array:
    """Read all blocks into one matrix, without a second copy of it in memory."""
    pointers = []
    for low, _ in blocks:
        with np.load(place / f"rows-{low:07d}.npz", allow_pickle=False) as held:
            pointers.append(held["indptr"])
    ends = np.cumsum([0, *(p[-1] for p in pointers)])
    data, indices = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int32)
    for (low, _), a, b in zip(blocks, ends[:-1], ends[1:], strict=True):
        with np.load(place / f"rows-{low:07d}.npz", allow_pickle=False) as held:
            data[a:b], indices[a:b] = held["data"], held["indices"]
    indptr = np.concatenate([[0], *(p[1:] + a for p, a in zip(pointers, ends[:-1], strict=True))])
    return sparse.csr_array((data, indices, indptr if ends[-1] >= 2**31 else indptr.astype(np.int32)), (size, size))


# ------------------------------------------------------------------------------------------------ files


def _packed(words: list[str]) -> NDArray[np.uint8]:
    return np.frombuffer("\n".join(words).encode(), np.uint8)


def _unpacked(held: NDArray[np.uint8]) -> list[str]:
    return held.tobytes().decode().split("\n") if held.size else []


def _write(path: Path, **arrays: Any) -> None:
    """Write a .npz file, whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("wb") as out:
        np.savez(out, **arrays)
    part.replace(path)


def _store(path: Path, array: NDArray[Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as out:
        np.save(out, array)
    shutil.move(part, path)
