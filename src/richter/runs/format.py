"""The file format of a run: provenance, records as plain data, rows as blocks, arrays."""

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
from functools import cache, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.core import Mark, StoreError

# --------------------------------------------------------------------------------------------------------- provenance

PACKAGES = ("richter", "torch", "numpy", "transformers", "scikit-learn")


def provenance() -> dict[str, Any]:
    """Return command, versions, revision and hardware of this process."""
    return {"command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [], "python": platform.python_version(),
            "versions": versions(), "revision": revision(), "hardware": hardware(), "pid": os.getpid(), "host": platform.node()}


def versions() -> dict[str, str]:
    """Versions of the installed packages that a run depends on."""
    return {name: version for name in PACKAGES if (version := _version(name)) is not None}


@cache  # reading the metadata of five packages takes longer than all else that makes a run
def _version(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def revision(folder: Path | None = None, *only: str) -> str | None:
    """Return the git revision of a folder (default: the working one), with + if files were changed (``only``: these files); None
    outside a repository."""
    words = ["git", "status", "--porcelain=v2", "--branch", "--no-ahead-behind", "--untracked-files=no", "--", *only]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    head = next((line.split()[2] for line in lines if line.startswith("# branch.oid")), "(initial)")  # before the first commit
    return None if head == "(initial)" else head + ("+" if not all(line.startswith("#") for line in lines) else "")


def hardware() -> dict[str, Any]:
    """Return processor, cores, memory, and the GPU if torch is loaded and has one. It never loads torch itself."""
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

DEPTH = 100  # nesting depth of settings that are written
DEEPEST = 400  # nesting depth of records that are read; Python allows about a thousand calls
HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # surrogates; a single one is not valid text


def plain(settings: Any, where: str = "settings", depth: int = 0) -> Any:
    """Convert a dataclass or mapping of settings to JSON data. Values without a JSON form raise an error instead of becoming
    text."""
    if depth > DEPTH:
        raise StoreError(f"{where[:60]}... is nested more than {DEPTH} levels deep, or contains itself. The record of a run "
                         f"cannot.")
    inside = partial(plain, depth=depth + 1)
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {f.name: inside(getattr(settings, f.name), f"{where}.{f.name}") for f in dataclasses.fields(settings)}
    if isinstance(settings, Mapping):
        record = {inside(str(k), f"a key of {where}"): inside(v, f"{where}[{k!r}]") for k, v in settings.items()}
        if len(record) < len(settings):
            raise StoreError(f"{where} has keys that are equal as text: {list(settings)}. A record stores them as text.")
        return record
    if isinstance(settings, (set, frozenset)):
        return sorted((inside(v, f"{where}[{v!r}]") for v in settings), key=json.dumps)  # the order of a set is arbitrary
    if isinstance(settings, (list, tuple)):
        return [inside(v, f"{where}[{i}]") for i, v in enumerate(settings)]
    if isinstance(settings, enum.Enum):
        return plain(settings.value, where)
    if isinstance(settings, (str, Path)):
        if not _is_utf8(text := str.__str__(settings) if isinstance(settings, str) else str(settings)):
            raise StoreError(f"{where} is {text!r}, which contains characters that UTF-8 does not have. The record of a run "
                             f"cannot.")
        return text
    if settings is None or isinstance(settings, (bool, int, float)):
        return settings
    if hasattr(settings, "item") and getattr(settings, "ndim", -1) == 0:  # a number of numpy or torch
        return plain(settings.item(), where)
    if isinstance(settings, (argparse.Namespace, SimpleNamespace)):
        return plain(vars(settings), where)
    raise StoreError(f"{where} is a {type(settings).__name__}, which cannot be stored in the record of a run. Settings are "
                     f"numbers, texts, lists and dataclasses of these.")


def parsed(text: Any) -> Any:
    """Parse a record of a run of unknown origin; raise an error if it is invalid or too deeply nested."""
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
    """Return an error in one line, even if its class fails in ``str``."""
    try:
        text = str(error)
    except Exception as why:
        text = f"(its text could not be made: {type(why).__name__})"
    return f"{type(error).__name__}: {text}"


def whole_step(step: Any) -> int:
    """Return a step as an integer of at most 64 bits; otherwise raise an error."""
    try:
        number = operator.index(step)
    except TypeError:
        raise StoreError(f"step={step!r}: the step of everything written to a run must be a whole number.") from None
    if not -2 ** 63 <= number < 2 ** 63:
        raise StoreError(f"step={step!r}: a step has at most 64 bits.")
    return number


def plain_text(text: Any) -> str:
    """Return a name or note as an object of exactly the class ``str``, so that it is the same when it is read."""
    if not isinstance(text, str) or not _is_utf8(text):
        raise StoreError(f"{text!r}: names and notes of a run must be text with valid UTF-8 characters.")
    return str.__str__(text)


def _is_utf8(text: str) -> bool:
    """Return whether a text can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --------------------------------------------------------------------------------------------------------------- rows
# A block has all rows of one write; a chunk has a piece of one curve. Both contain: flags, the number of rows, the steps (first
# and
# stride, if they are even), the curves (not in a chunk), values, and only if there are any: errors, numbers of notes, marks. NaN
# is
# NaN; 0 means no note; marks are numbered as in MARKS.

KINDS = ("<i8", "<u4", "<f8", "<f8", "<u4", "u1")  # types of the columns
FLAGS = (0, 1, 0, 4, 8, 16)  # flag bits of the columns in a block; 0: always present
EVEN = 2  # flag of even steps
HEAD = struct.Struct("<BI")
MARKS = (Mark.EXACT, Mark.TRIVIAL, Mark.ESTIMATED, Mark.BOUND, Mark.UNDEFINED, Mark.REFUSED, Mark.IDLE,
         Mark.FAILED)  # new marks must be appended


class Columns(NamedTuple):
    """Rows: step, curve (None: all rows are of one), value, error, note and mark (None: no row has one)."""

    step: NDArray[np.int64]
    series: NDArray[np.int64] | None
    value: NDArray[np.float64]
    error: NDArray[np.float64]
    note: NDArray[np.int64] | None = None
    mark: NDArray[np.int64] | None = None

    def taken(self, which: Any) -> Columns:
        """The columns of the rows that an index or mask selects."""
        columns: list[Any] = [None if column is None else column[which] for column in self]
        return Columns(*columns)


NONE = Columns(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))


def pack(c: Columns) -> bytes:
    """Columns as bytes; constant differences and missing columns take no room."""
    n = len(c.step)
    differences = np.diff(c.step)  # modulo 2^64, like the sums when reading
    even = bool((differences == differences[:1]).all())
    step = np.append(c.step[:1], differences[:1] if n > 1 else 0) if even else c.step
    error = None if np.isnan(c.error).all() else c.error
    note, mark = (column if column is not None and column.any() else None for column in (c.note, c.mark))
    columns = [(column, kind, flag) for column, kind, flag in zip((step, c.series, c.value, error, note, mark), KINDS, FLAGS,
                                                                  strict=True) if column is not None]
    flags = EVEN * even + sum(flag for _, _, flag in columns)
    return HEAD.pack(flags, n) + b"".join(column.astype(kind).tobytes() for column, kind, _ in columns)


def pack_step(step: int, series: Sequence[int], values: Iterable[float]) -> bytes:
    """``pack`` for values at one step, without an array for each column."""
    n = len(series)
    return struct.pack(f"<BIqq{n}I{n}d", FLAGS[1] | EVEN, n, step, 0, *series, *values)


def head(body: bytes) -> tuple[int, int]:
    """Return flags and number of rows."""
    if len(body) < HEAD.size:
        raise StoreError("a block of its rows is cut off")
    flags, n = HEAD.unpack_from(body)
    return flags, n


@lru_cache(64)
def _layout(counts: tuple[int, ...]) -> np.dtype[Any]:
    """Layout of a block with these numbers of entries per column."""
    return np.dtype([("head", "V", HEAD.size), *zip(Columns._fields, KINDS, counts, strict=True)])


def unpack(bodies: Iterable[bytes]) -> Columns:
    """Read the rows of consecutive blocks; blocks of equal form are read together. Invalid blocks raise an error before anything
    is allocated."""
    pieces = []
    for (flags, n, size), group in itertools.groupby(bodies, key=lambda body: (*head(body), len(body))):
        counts = 2 if flags & EVEN else n, *(n if not flag or flags & flag else 0 for flag in FLAGS[1:])
        if not n or flags >= 32 or size != HEAD.size + sum(map(operator.mul, counts, (8, 4, 8, 8, 4, 1))):
            raise StoreError("a block of its rows does not have the announced size")
        blocks = np.frombuffer(b"".join(group), _layout(counts))
        columns: list[Any] = [blocks[name].astype(np.float64 if kind == "<f8" else np.int64).reshape(-1) if count else None
                              for name, kind, count in zip(Columns._fields, KINDS, counts, strict=True)]
        if flags & EVEN:
            columns[0] = (columns[0][::2, None] + columns[0][1::2, None] * np.arange(n)).reshape(-1)
        c = Columns(*columns)
        if c.mark is not None and c.mark.max() >= len(MARKS):
            raise StoreError(f"its rows contain the mark {c.mark.max()}, which does not exist")
        pieces.append(c if flags & FLAGS[3] else c._replace(error=np.full(len(c.step), np.nan)))
    return joined(pieces)


def joined(pieces: Sequence[Columns]) -> Columns:
    """Concatenate rows."""
    if len(pieces) == 1:
        return pieces[0]

    def column(i: int) -> Any:
        if all(piece[i] is None for piece in pieces):
            return None
        return np.concatenate([np.zeros(len(piece.step), np.int64) if piece[i] is None else piece[i] for piece in pieces])

    return Columns(*map(column, range(len(KINDS)))) if pieces else NONE


def latest(c: Columns) -> Columns:
    """Sort the rows of one curve by step; of several rows for one step keep the last one written."""
    if (c.step[1:] > c.step[:-1]).all():
        return c
    order = np.argsort(c.step, kind="stable")
    step = c.step[order]
    return c.taken(order[np.append(step[1:] != step[:-1], True)])


def by_curve(c: Columns) -> dict[int, Columns]:
    """Split rows by curve, in writing order."""
    if c.series is None or not len(c.series):
        return {}
    order = np.argsort(c.series, kind="stable")
    series = c.series[order]
    starts = np.flatnonzero(np.append(True, series[1:] != series[:-1]))
    rest = c._replace(series=None)
    return {int(series[a]): rest.taken(order[a:b]) for a, b in itertools.pairwise([*starts.tolist(), len(series)])}


# ------------------------------------------------------------------------------------------------------------- arrays
# Arrays are compressed if that saves space, and symmetric positive semi-definite ones may be stored by their leading eigenpairs.

LARGE = 2 ** 20  # bytes; larger arrays are separate files
MOST = 2 ** 32  # bytes; no array of a run is larger, so a small file cannot request all memory
SAMPLE = 2 ** 15  # bytes that are compressed as a test
NUMBERS = "biufc"  # booleans, integers, floats, complex; never objects
DTYPE = re.compile(rf"[<|][{NUMBERS}](1|2|4|8|16|32)")
DIMENSIONS = 32


class Encoded(NamedTuple):
    """An array as bytes. ``form``: plain, zlib, eigen (values and vectors), or half and half-zlib (the lower triangle of a
    symmetric matrix)."""

    form: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(values: ArrayLike, keep: float | None = None) -> Encoded:
    """Encode an array. ``keep``: store a symmetric positive semi-definite matrix by leading eigenpairs, up to this share of its
    trace."""
    try:
        a = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as why:
        raise StoreError(f"a {type(values).__name__} is not an array of numbers and cannot be stored: {why}.") from why
    dtype, size = a.dtype.newbyteorder("<"), a.dtype.itemsize
    if dtype.kind not in NUMBERS:
        raise StoreError(f"only arrays of numbers can be stored; this one has dtype {a.dtype}.")
    if not _fits(a.shape, size):
        raise StoreError(f"an array of shape {a.shape} and dtype {a.dtype} is too large for a run, which stores up to 4 GiB and "
                         f"{DIMENSIONS} dimensions per array. Store a part of it, or keep it elsewhere.")
    if keep is not None:
        if not 0 < keep <= 1:
            raise StoreError(f"eigen={keep!r}: the share of the trace to keep must be above 0 and at most 1.")
        if dtype.kind != "f":
            raise StoreError(f"only a matrix of real floating-point numbers can be stored by eigenpairs; this one has dtype "
                             f"{a.dtype}. Store it whole (eigen=None).")
        eigenvalues, vectors = leading(a, keep)
        if size > 2 and len(eigenvalues) * (len(a) + 1) < a.size:  # half precision would be too inaccurate for the vectors
            pairs = np.concatenate([eigenvalues[:, None], vectors.T], 1).astype(dtype)
            return Encoded("eigen", dtype.str, a.shape, _deflated(pairs.tobytes(), size))
    half = a.ndim == 2 and a.shape[0] == a.shape[1] > 1 and np.array_equal(a, a.T)
    raw = (a[np.tri(len(a), dtype=bool)] if half else a).astype(dtype, copy=False).tobytes()
    # Compress only if it saves a fifth: the last bits of measured numbers are noise, and compressing noise costs more time than
    # it
    # saves space. For a large array a piece from the middle decides.
    start = max(0, len(raw) // 2 - SAMPLE // 2) // size * size
    sample = raw[start:start + SAMPLE // size * size]
    pays = len(_deflated(sample, size)) < 0.8 * len(sample)
    form = ("half-zlib" if pays else "half") if half else "zlib" if pays else "plain"
    return Encoded(form, dtype.str, a.shape, _deflated(raw, size) if pays else raw)


def decode(form: str, dtype: str, shape: tuple[int, ...], data: bytes) -> NDArray[Any]:
    """Array from its stored form."""
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
            # allocated only after the announced size was verified
            whole, lower = np.empty(shape, kind), np.tri(shape[0], dtype=bool)
            whole[lower] = whole.T[lower] = entries
            return whole
        if form == "eigen":
            values, vectors = eigenpairs(dtype, shape, data)
            return ((vectors * values) @ vectors.T).astype(kind)
    except MemoryError:
        raise StoreError(f"an array of dtype {dtype} and shape {shape} is larger than the free memory.") from None
    raise StoreError(f"Richter writes no arrays of form {form!r}.")


def eigenpairs(dtype: str, shape: tuple[int, ...], data: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return values [r] and vectors [d, r] of a matrix that is stored by them, without forming it."""
    kind = _kind(dtype, shape)
    if kind.kind != "f" or len(shape) != 2 or shape[0] != shape[1]:
        raise StoreError(f"Richter writes no eigenpairs of arrays of dtype {dtype!r} and shape {shape}.")
    row = (shape[0] + 1) * kind.itemsize
    raw = _inflated(data, shape[0] * row, kind.itemsize)
    if len(raw) % row:
        raise StoreError("a stored matrix is damaged: its eigenpairs have the wrong size.")
    pairs = np.frombuffer(raw, kind).reshape(-1, shape[0] + 1)
    return pairs[:, 0].copy(), pairs[:, 1:].T.copy()


def leading(a: NDArray[Any], share: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the largest eigenvalues [r] and their vectors [d, r] that make up ``share`` of the trace."""
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
    if -values.clip(max=0).sum() > 1e-5 * total[-1:].sum():  # more than the rounding errors of single precision
        raise StoreError("a matrix with negative eigenvalues cannot be stored by its leading ones; store it whole (eigen=None).")
    rank = int(np.searchsorted(total, share * total[-1], side="left")) + 1 if len(total) and total[-1] > 0 else 0
    return values[:rank], vectors[:, :rank]


def to_file(path: Path, e: Encoded) -> None:
    """Write an encoded array to a safetensors file."""
    from safetensors.numpy import save_file
    save_file({"data": np.frombuffer(e.data, np.uint8)}, path,
              metadata={"form": e.form, "dtype": e.dtype, "shape": json.dumps(e.shape)})


def from_file(path: Path) -> bytes:
    """Bytes of an encoded array in a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file
    try:
        return load_file(path)["data"].tobytes()
    except (SafetensorError, KeyError, OSError, ValueError, TypeError) as why:
        raise StoreError(f"the stored array {path} cannot be read: {why}.") from why


def _fits(shape: tuple[int, ...], itemsize: int) -> bool:
    """Return whether an array of this shape may be stored."""
    return len(shape) <= DIMENSIONS and math.prod(max(k, 1) for k in shape) * itemsize <= MOST


def _kind(dtype: str, shape: tuple[int, ...]) -> np.dtype[Any]:
    """Return the announced dtype, if Richter writes arrays of this dtype and shape."""
    try:
        kind = np.dtype(dtype) if DTYPE.fullmatch(dtype) else None
    except TypeError:
        kind = None  # e.g. a float of 8 bits
    if kind is None or any(k < 0 for k in shape) or not _fits(shape, kind.itemsize):
        raise StoreError(f"Richter writes no arrays of dtype {dtype!r} and shape {shape}.")
    return kind


def _deflated(raw: bytes, itemsize: int) -> bytes:
    """Put bytes of equal significance side by side (exponents with exponents), and compress."""
    return zlib.compress(np.frombuffer(raw, np.uint8).reshape(-1, itemsize).T.tobytes(), 1)


def _inflated(data: bytes, most: int, itemsize: int) -> bytes:
    """Undo ``_deflated``. At most the announced size is read, and the whole stream, because its end contains the checksum."""
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(data, most + 1)
    except zlib.error as why:
        raise StoreError(f"a stored array is damaged: {why}.") from why
    if not stream.eof:
        raise StoreError("a stored array is damaged: it has fewer or more bytes than its shape needs.")
    if len(raw) % itemsize:
        raise StoreError("a stored array is damaged: its size is not a whole number of entries.")
    return np.frombuffer(raw, np.uint8).reshape(itemsize, -1).T.tobytes()
