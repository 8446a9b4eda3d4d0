"""Arrays as bytes and back: compressed where that pays, symmetric positive semi-definite ones as leading eigenpairs, and
large ones as files named by their content."""

from __future__ import annotations

import json
import math
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.core import StoreError
from richter.runs.format import digest_of, own_folder, regular

LARGE = 2 ** 20  # bytes; above, an array is a file of its own
MOST = 2 ** 32  # bytes; no array of a run is larger, so that a small file cannot ask for all the memory there is
SAMPLE = 2 ** 15  # bytes that are deflated to see whether it pays
KINDS = "biufc"  # booleans, integers, floats, complex: never objects
DTYPE = re.compile(rf"[<|][{KINDS}](1|2|4|8|16|32)")
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
    a = _as_array(values)
    if a.dtype.kind not in KINDS:
        raise StoreError(f"arrays of numbers can be stored; this one has dtype {a.dtype}.")
    if not _fits(a.shape, a.dtype.itemsize):
        raise StoreError(f"an array of shape {a.shape} and dtype {a.dtype} is too large for a run, which keeps up to 4 GiB and "
                         f"{DIMENSIONS} dimensions in one. Store a part of it, or keep it elsewhere.")
    if keep is not None:
        if not 0 < keep <= 1:
            raise StoreError(f"eigen={keep!r}: the share of the trace to keep is above 0 and at most 1.")
        if a.dtype.kind != "f":
            raise StoreError(f"only a matrix of real floating-point numbers is kept by eigenpairs; this one has dtype {a.dtype}. "
                             f"Store it whole (eigen=None).")
        eigenvalues, vectors = leading(a, keep)
        if a.dtype.itemsize > 2 and len(eigenvalues) * (len(a) + 1) < a.size:  # half precision would spoil the vectors
            packed = np.concatenate([eigenvalues[:, None], vectors.T], 1).astype(a.dtype)
            return Encoded("eigen", a.dtype.newbyteorder("<").str, a.shape, _deflated(_bytes(packed), a.dtype.itemsize))
    half = a.ndim == 2 and a.shape[0] == a.shape[1] > 1 and np.array_equal(a, a.T)
    raw = _bytes(a[np.tri(len(a), dtype=bool)] if half else a)
    deflated = _pays(raw, a.dtype.itemsize)
    form = ("half-zlib" if deflated else "half") if half else "zlib" if deflated else "plain"
    return Encoded(form, a.dtype.newbyteorder("<").str, a.shape, _deflated(raw, a.dtype.itemsize) if deflated else raw)


def decode(form: str, dtype: str, shape: tuple[int, ...], data: bytes) -> NDArray[Any]:
    kind = _kind(dtype, shape)
    try:
        if form == "plain":
            return _array(data, kind, shape)
        if form == "zlib":
            return _array(_unshuffled(_inflated(data, math.prod(shape) * kind.itemsize), kind.itemsize), kind, shape)
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
    d = shape[0]
    raw = _unshuffled(_inflated(data, (d + 1) * d * kind.itemsize), kind.itemsize)
    if len(raw) % ((d + 1) * kind.itemsize):
        raise StoreError("a stored matrix is damaged: its eigenpairs have the wrong size.")
    packed = np.frombuffer(raw, kind).reshape(-1, d + 1)
    return packed[:, 0].copy(), packed[:, 1:].T.copy()


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


def object_path(folder: Path, name: str, verify: bool = True) -> Path:
    """Where an object lies; its name is a digest, so it cannot lead out of the folder, and its content is checked."""
    if not re.fullmatch(r"[0-9a-f]{64}", name):
        raise StoreError(f"{name!r} is not the name of a stored object.")
    path = own_folder(folder) / f"{name}.safetensors"
    if path.is_symlink() or not path.is_file():
        raise StoreError(f"the object {name[:12]}... of this run is missing from {folder}. It was deleted, or not copied along.")
    if verify:
        with open(regular(path), "rb") as f:
            if digest_of(f) != name:
                raise StoreError(f"the object {name[:12]}... in {folder} has other content than was written. It is damaged.")
    return path


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


def _as_array(values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as why:
        raise StoreError(f"a {type(values).__name__} that is no array of numbers cannot be stored as one: {why}.") from why


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


def _bytes(a: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(a, a.dtype.newbyteorder("<")).tobytes()


def _pays(raw: bytes, itemsize: int) -> bool:
    """Does deflating save a fifth? The last bits of measured numbers are noise, and packing noise costs more time than it saves
    room. Of a large array a piece from the middle tells."""
    start = max(0, len(raw) // 2 - SAMPLE // 2) // itemsize * itemsize
    sample = raw[start:start + SAMPLE // itemsize * itemsize]
    return len(_deflated(sample, itemsize)) < 0.8 * len(sample)


def _deflated(raw: bytes, itemsize: int) -> bytes:
    """Bytes of equal weight side by side (exponents with exponents), then deflated."""
    return zlib.compress(np.frombuffer(raw, np.uint8).reshape(-1, itemsize).T.tobytes(), 1)


def _unshuffled(raw: bytes, itemsize: int) -> bytes:
    if len(raw) % itemsize:
        raise StoreError("a stored array is damaged: its bytes are no whole number of entries.")
    return np.frombuffer(raw, np.uint8).reshape(itemsize, -1).T.tobytes()


def _inflated(data: bytes, most: int) -> bytes:
    """Never more than was announced, and the whole stream, whose end holds its checksum."""
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(data, most + 1)
    except zlib.error as why:
        raise StoreError(f"a stored array is damaged: {why}.") from why
    if not stream.eof:
        raise StoreError("a stored array is damaged: its bytes end too early, or are more than its shape says.")
    return raw


def _array(raw: bytes, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise StoreError(f"a stored array is damaged: {len(raw)} bytes for shape {shape} of {kind}.")
    return np.frombuffer(raw, kind).reshape(shape).copy()
