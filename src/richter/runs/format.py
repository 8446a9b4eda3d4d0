"""What the bytes and texts of a run mean: records as plain data, rows as blocks, arrays; and what a run says of its process."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib.metadata
import itertools
import json
import math
import operator
import os
import platform
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.core import Mark, StoreError

# --------------------------------------------------------------------------------------------------------- provenance

PACKAGES = ("richter", "torch", "numpy", "transformers", "scikit-learn")


def provenance() -> dict[str, Any]:
    """Command, versions, revision and hardware of this process."""
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
    facts: dict[str, Any] = {"machine": platform.machine(), "processor": platform.processor(), "cores": os.cpu_count()}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts["processor"] = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


# ------------------------------------------------------------------------------------------------------------ records

DEPTH = 100  # of settings within settings that are written,
DEEPEST = 400  # and of what is read: Python itself follows up to a thousand calls
HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # of characters: where one stands alone, no text can be made of it


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
    """A name or note of exactly the class ``str``, so that it is the same when it is read."""
    if not isinstance(text, str) or not _is_utf8(text):
        raise StoreError(f"{text!r}: names and notes of a run are text, of characters that UTF-8 has.")
    return str.__str__(text)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --------------------------------------------------------------------------------------------------------------- rows
# A block has all rows of one write, a chunk a piece of one curve: flags, the number of rows, the steps (first and stride, where
# they are even), the curves (not in a chunk), values, and only where there are any: errors, numbers of notes, marks. NaN is NaN;
# no note is 0; the marks are numbered as in MARKS.

KINDS = ("<i8", "<u4", "<f8", "<f8", "<u4", "u1")  # of the columns
FLAGS = (0, 1, 0, 4, 8, 16)  # by which a block says that it has a column; 0: every block has it
EVEN = 2  # the flag of even steps
HEAD = struct.Struct("<BI")
MARKS = (Mark.EXACT, Mark.TRIVIAL, Mark.ESTIMATED, Mark.BOUND, Mark.UNDEFINED, Mark.REFUSED, Mark.IDLE,
         Mark.FAILED)  # a new one goes to the end


class Columns(NamedTuple):
    """Rows: step, curve (None: all of one), value, error, note and mark (None: no row has one)."""

    step: NDArray[np.int64]
    series: NDArray[np.int64] | None
    value: NDArray[np.float64]
    error: NDArray[np.float64]
    note: NDArray[np.int64] | None = None
    mark: NDArray[np.int64] | None = None

    def taken(self, which: Any) -> Columns:
        columns: list[Any] = [None if column is None else column[which] for column in self]
        return Columns(*columns)


NONE = Columns(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))


def pack(c: Columns) -> bytes:
    n = len(c.step)
    differences = np.diff(c.step)  # modulo 2^64, as they are added again
    even = bool((differences == differences[:1]).all())
    step = np.append(c.step[:1], differences[:1] if n > 1 else 0) if even else c.step
    error = None if np.isnan(c.error).all() else c.error
    note, mark = (column if column is not None and column.any() else None for column in (c.note, c.mark))
    columns = [(column, kind, flag) for column, kind, flag in zip((step, c.series, c.value, error, note, mark), KINDS, FLAGS,
                                                                  strict=True) if column is not None]
    flags = EVEN * even + sum(flag for _, _, flag in columns)
    return HEAD.pack(flags, n) + b"".join(column.astype(kind).tobytes() for column, kind, _ in columns)


def pack_step(step: int, series: Sequence[int], values: Iterable[float]) -> bytes:
    """``pack`` of values at one step, without an array for each column."""
    n = len(series)
    return struct.pack(f"<BIqq{n}I{n}d", FLAGS[1] | EVEN, n, step, 0, *series, *values)


def head(body: bytes) -> tuple[int, int]:
    """Flags and number of rows."""
    if len(body) < HEAD.size:
        raise StoreError("a block of its rows is cut off")
    flags, n = HEAD.unpack_from(body)
    return flags, n


@lru_cache(64)
def _layout(counts: tuple[int, ...]) -> np.dtype[Any]:
    return np.dtype([("head", "V", HEAD.size), *zip(Columns._fields, KINDS, counts, strict=True)])


def unpack(bodies: Iterable[bytes]) -> Columns:
    """The rows of blocks one after the other; those of the same form are read together. What is no block is refused before
    something is made of it."""
    pieces = []
    for (flags, n, size), group in itertools.groupby(bodies, key=lambda body: (*head(body), len(body))):
        counts = 2 if flags & EVEN else n, *(n if not flag or flags & flag else 0 for flag in FLAGS[1:])
        if not n or flags >= 32 or size != HEAD.size + sum(map(operator.mul, counts, (8, 4, 8, 8, 4, 1))):
            raise StoreError("a block of its rows has another size than it says")
        blocks = np.frombuffer(b"".join(group), _layout(counts))
        columns: list[Any] = [blocks[name].astype(np.float64 if kind == "<f8" else np.int64).reshape(-1) if count else None
                              for name, kind, count in zip(Columns._fields, KINDS, counts, strict=True)]
        if flags & EVEN:
            columns[0] = (columns[0][::2, None] + columns[0][1::2, None] * np.arange(n)).reshape(-1)
        c = Columns(*columns)
        if c.mark is not None and c.mark.max() >= len(MARKS):
            raise StoreError(f"its rows hold the mark {c.mark.max()}, and no row has such a one")
        pieces.append(c if flags & FLAGS[3] else c._replace(error=np.full(len(c.step), np.nan)))
    return joined(pieces)


def joined(pieces: Sequence[Columns]) -> Columns:
    """Rows one after the other."""
    if len(pieces) == 1:
        return pieces[0]

    def column(i: int) -> Any:
        if all(piece[i] is None for piece in pieces):
            return None
        return np.concatenate([np.zeros(len(piece.step), np.int64) if piece[i] is None else piece[i] for piece in pieces])

    return Columns(*map(column, range(len(KINDS)))) if pieces else NONE


def latest(c: Columns) -> Columns:
    """Rows of one curve by step, and of several for the same step the one that was written last."""
    if (c.step[1:] > c.step[:-1]).all():
        return c
    order = np.argsort(c.step, kind="stable")
    step = c.step[order]
    return c.taken(order[np.append(step[1:] != step[:-1], True)])


def by_curve(c: Columns) -> dict[int, Columns]:
    """The rows of each curve, in the order of writing."""
    if c.series is None or not len(c.series):
        return {}
    order = np.argsort(c.series, kind="stable")
    series = c.series[order]
    starts = np.flatnonzero(np.append(True, series[1:] != series[:-1]))
    rest = c._replace(series=None)
    return {int(series[a]): rest.taken(order[a:b]) for a, b in itertools.pairwise([*starts.tolist(), len(series)])}


# ------------------------------------------------------------------------------------------------------------- arrays
# Arrays are compressed where that pays, and symmetric positive semi-definite ones may be kept by their leading eigenpairs.

LARGE = 2 ** 20  # bytes; above, an array is a file of its own
MOST = 2 ** 32  # bytes; no array of a run is larger, so that a small file cannot ask for all the memory there is
SAMPLE = 2 ** 15  # bytes that are deflated to see whether it pays
NUMBERS = "biufc"  # booleans, integers, floats, complex: never objects
DTYPE = re.compile(rf"[<|][{NUMBERS}](1|2|4|8|16|32)")
DIMENSIONS = 32


class Encoded(NamedTuple):
    """How an array is kept: ``form`` is plain, zlib, eigen (values and vectors), or half and half-zlib (the lower triangle of a
    symmetric matrix)."""

    form: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(values: ArrayLike, keep: float | None = None) -> Encoded:
    """``keep``: a symmetric positive semi-definite matrix by its leading eigenpairs, up to that share of its trace."""
    try:
        a = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as why:
        raise StoreError(f"a {type(values).__name__} that is no array of numbers cannot be stored as one: {why}.") from why
    dtype, size = a.dtype.newbyteorder("<"), a.dtype.itemsize
    if dtype.kind not in NUMBERS:
        raise StoreError(f"arrays of numbers can be stored; this one has dtype {a.dtype}.")
    if not _fits(a.shape, size):
        raise StoreError(f"an array of shape {a.shape} and dtype {a.dtype} is too large for a run, which keeps up to 4 GiB and "
                         f"{DIMENSIONS} dimensions in one. Store a part of it, or keep it elsewhere.")
    if keep is not None:
        if not 0 < keep <= 1:
            raise StoreError(f"eigen={keep!r}: the share of the trace to keep is above 0 and at most 1.")
        if dtype.kind != "f":
            raise StoreError(f"only a matrix of real floating-point numbers is kept by eigenpairs; this one has dtype {a.dtype}. "
                             f"Store it whole (eigen=None).")
        eigenvalues, vectors = leading(a, keep)
        if size > 2 and len(eigenvalues) * (len(a) + 1) < a.size:  # half precision would spoil the vectors
            pairs = np.concatenate([eigenvalues[:, None], vectors.T], 1).astype(dtype)
            return Encoded("eigen", dtype.str, a.shape, _deflated(pairs.tobytes(), size))
    half = a.ndim == 2 and a.shape[0] == a.shape[1] > 1 and np.array_equal(a, a.T)
    raw = (a[np.tri(len(a), dtype=bool)] if half else a).astype(dtype, copy=False).tobytes()
    # Does deflating save a fifth? The last bits of measured numbers are noise, and packing noise costs more time than it saves
    # room. Of a large array a piece from the middle tells.
    start = max(0, len(raw) // 2 - SAMPLE // 2) // size * size
    sample = raw[start:start + SAMPLE // size * size]
    pays = len(_deflated(sample, size)) < 0.8 * len(sample)
    form = ("half-zlib" if pays else "half") if half else "zlib" if pays else "plain"
    return Encoded(form, dtype.str, a.shape, _deflated(raw, size) if pays else raw)


def decode(form: str, dtype: str, shape: tuple[int, ...], data: bytes) -> NDArray[Any]:
    kind = _kind(dtype, shape)
    try:
        if form == "zlib":
            form, data = "plain", _inflated(data, math.prod(shape) * kind.itemsize, kind.itemsize)
        if form == "plain":
            if len(data) != math.prod(shape) * kind.itemsize:
                raise StoreError(f"a stored array is damaged: {len(data)} bytes for shape {shape} of {kind}.")
            return np.frombuffer(data, kind).reshape(shape).copy()
        if form in ("half", "half-zlib") and len(shape) == 2 and shape[0] == shape[1]:
            entries = decode("zlib" if form == "half-zlib" else "plain", dtype, (shape[0] * (shape[0] + 1) // 2,), data)
            whole, lower = np.empty(shape, kind), np.tri(shape[0], dtype=bool)  # not before it is known that there is so much
            whole[lower] = whole.T[lower] = entries
            return whole
        if form == "eigen":
            values, vectors = eigenpairs(dtype, shape, data)
            return ((vectors * values) @ vectors.T).astype(kind)
    except MemoryError:
        raise StoreError(f"an array of dtype {dtype} and shape {shape} is larger than the memory that is free.") from None
    raise StoreError(f"an array of form {form!r} is nothing that Richter writes.")


def eigenpairs(dtype: str, shape: tuple[int, ...], data: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """Values [r] and vectors [d, r] of a matrix that is kept by them, without forming it."""
    kind = _kind(dtype, shape)
    if kind.kind != "f" or len(shape) != 2 or shape[0] != shape[1]:
        raise StoreError(f"eigenpairs of an array of dtype {dtype!r} and shape {shape} are nothing that Richter writes.")
    row = (shape[0] + 1) * kind.itemsize
    raw = _inflated(data, shape[0] * row, kind.itemsize)
    if len(raw) % row:
        raise StoreError("a stored matrix is damaged: its eigenpairs have the wrong size.")
    pairs = np.frombuffer(raw, kind).reshape(-1, shape[0] + 1)
    return pairs[:, 0].copy(), pairs[:, 1:].T.copy()


def leading(a: NDArray[Any], share: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """The largest eigenvalues [r] and their vectors [d, r] that make up ``share`` of the trace."""
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise StoreError(f"only a symmetric matrix has eigenpairs to keep; this array has shape {a.shape}.")
    if a.dtype.kind == "c" or not np.isfinite(a).all():
        raise StoreError("only a real matrix without NaN and infinity has eigenpairs to keep; store it whole (eigen=None).")
    a = a.astype(np.float64)
    if not np.allclose(a, a.T, rtol=1e-4, atol=1e-6 * np.abs(a).max(initial=0)):
        raise StoreError(f"only a symmetric matrix has eigenpairs to keep; this array of shape {a.shape} is not symmetric.")
    values, vectors = np.linalg.eigh(a / 2 + a.T / 2)
    values, vectors = values[::-1], vectors[:, ::-1]
    total = np.cumsum(values.clip(0))
    if -values.clip(max=0).sum() > 1e-5 * total[-1:].sum():  # more than the rounding of single precision leaves
        raise StoreError("a matrix with negative eigenvalues cannot be kept by its leading ones; store it whole (eigen=None).")
    rank = int(np.searchsorted(total, share * total[-1], side="left")) + 1 if len(total) and total[-1] > 0 else 0
    return values[:rank], vectors[:, :rank]


def to_file(path: Path, e: Encoded) -> None:
    from safetensors.numpy import save_file
    save_file({"data": np.frombuffer(e.data, np.uint8)}, path,
              metadata={"form": e.form, "dtype": e.dtype, "shape": json.dumps(e.shape)})


def from_file(path: Path) -> bytes:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file
    try:
        return load_file(path)["data"].tobytes()
    except (SafetensorError, KeyError, OSError, ValueError, TypeError) as why:
        raise StoreError(f"the stored array {path} cannot be read: {why}.") from why


def _fits(shape: tuple[int, ...], itemsize: int) -> bool:
    return len(shape) <= DIMENSIONS and math.prod(max(k, 1) for k in shape) * itemsize <= MOST


def _kind(dtype: str, shape: tuple[int, ...]) -> np.dtype[Any]:
    """The announced dtype, if arrays of it and of this shape are written at all."""
    try:
        kind = np.dtype(dtype) if DTYPE.fullmatch(dtype) else None
    except TypeError:
        kind = None  # e.g. a float of 8 bits
    if kind is None or any(k < 0 for k in shape) or not _fits(shape, kind.itemsize):
        raise StoreError(f"an array of dtype {dtype!r} and shape {shape} is nothing that Richter writes.")
    return kind


def _deflated(raw: bytes, itemsize: int) -> bytes:
    """Bytes of equal weight side by side (exponents with exponents), then deflated."""
    return zlib.compress(np.frombuffer(raw, np.uint8).reshape(-1, itemsize).T.tobytes(), 1)


def _inflated(data: bytes, most: int, itemsize: int) -> bytes:
    """``_deflated`` undone: never more than was announced, and the whole stream, whose end holds its checksum."""
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(data, most + 1)
    except zlib.error as why:
        raise StoreError(f"a stored array is damaged: {why}.") from why
    if not stream.eof:
        raise StoreError("a stored array is damaged: its bytes end too early, or are more than its shape says.")
    if len(raw) % itemsize:
        raise StoreError("a stored array is damaged: its bytes are no whole number of entries.")
    return np.frombuffer(raw, np.uint8).reshape(itemsize, -1).T.tobytes()
