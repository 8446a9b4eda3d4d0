"""Readers for your own files: IDX, CIFAR binary, SVHN .mat, STL-10, folders of images, Hugging Face data sets.

    train, test = files.mat("train_32x32.mat"), files.mat("test_32x32.mat")
    data = richter.tasks.split(train, test, n=5000)     # standardised tensors

Files are read as data: no pickle is opened, and nothing in a file is executed.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from richter.core import DataError
from richter.tasks.pictures import Images, PathLike, contents, hugging_face, image_folder, picture, raw

__all__ = ["Images", "cifar_binary", "hugging_face", "idx", "idx_images", "image_folder", "mat", "picture", "stl10"]

_IDX = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def idx(path: PathLike) -> NDArray[Any]:
    """Read the array in an IDX file (MNIST, KMNIST, EMNIST), with or without gzip."""
    data = contents(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX:
        raise DataError(f"{path} is not an IDX file: it begins with {data[:4].hex(' ') or 'nothing'}, expected 00 00, a type "
                        f"({', '.join(f'{k:02x}' for k in _IDX)}) and a number of axes.")
    kind, axes = np.dtype(_IDX[data[2]]), data[3]
    start = 4 + 4 * axes
    if not 1 <= axes <= 8 or len(data) < start:
        raise DataError(f"{path} is an IDX file that ends within its header, or has a senseless one ({len(data)} bytes, {axes} "
                        f"axes). Download it again.")
    shape = tuple(int(k) for k in np.frombuffer(data, ">u4", axes, 4))
    expected = start + math.prod(shape) * kind.itemsize
    if len(data) != expected or 0 in shape:
        raise DataError(f"{path} has {len(data):,} bytes and its header promises {expected:,} (shape {shape}, {kind.name}): "
                        f"it is empty, cut short or not what it says. Download it again.")
    return np.frombuffer(data, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))


def idx_images(images: PathLike, labels: PathLike) -> Images:
    """Read the two IDX files of one part of MNIST and its variants."""
    x, y = idx(images), idx(labels)
    if x.ndim != 3 or x.dtype != np.uint8 or y.shape != x.shape[:1] or y.dtype.kind not in "iu":
        raise DataError(f"{images} has shape {x.shape} ({x.dtype}) and {labels} {y.shape} ({y.dtype}); images are [n,h,w] of "
                        f"uint8 and labels [n] of whole numbers. Are the two files swapped, or of different parts?")
    return _checked(x[:, None], y, (), images)


def cifar_binary(paths: PathLike | Iterable[PathLike], classes: int = 10) -> Images:
    """Read the binary version of CIFAR-10, or of CIFAR-100 with its fine labels (``classes=100``); several files are
    concatenated."""
    if classes not in (10, 100):
        raise DataError(f"cifar_binary(classes={classes!r}): there are CIFAR-10 and CIFAR-100; give 10 or 100.")
    head = 1 if classes == 10 else 2  # CIFAR-100 has a coarse label first
    parts = []
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else list(paths):
        data = np.frombuffer(contents(path), np.uint8)
        if data.size == 0 or data.size % (3072 + head):
            raise DataError(f"{path} has {data.size:,} bytes, not a multiple of {3072 + head} ({head} of label, 3 x 32 x 32 of "
                            f"pixels): it is cut short, or is not the binary version of CIFAR-{classes}.")
        parts.append(data.reshape(-1, 3072 + head))
    if not parts:
        raise DataError("cifar_binary was given no files. CIFAR-10 has data_batch_1.bin to data_batch_5.bin and test_batch.bin.")
    rows = np.concatenate(parts)
    y = rows[:, head - 1].astype(np.int64)
    if y.max() >= classes:
        raise DataError(f"the label {y.max()} was read, beyond the {classes} classes: this is not the binary version of "
                        f"CIFAR-{classes}. For CIFAR-100 give classes=100.")
    return Images(rows[:, head:].reshape(-1, 3, 32, 32), y)


def mat(path: PathLike, image: str = "X", label: str = "y") -> Images:
    """Read SVHN's train_32x32.mat: MATLAB version 5, images [h,w,c,n], labels 1 to 10, where 10 is the digit 0."""
    data = contents(path)
    if data[124:128] not in (b"\x00\x01IM", b"\x01\x00MI"):
        later = " (it is version 7.3, which is HDF5: save it with -v7)" if b"MATLAB 7.3" in data[:32] else ""
        raise DataError(f"{path} is not a MATLAB file of version 5{later}.")
    from scipy.io import loadmat
    try:
        arrays = loadmat(io.BytesIO(data), variable_names=[image, label])
    except Exception as error:  # any error that a damaged file can cause
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged. Download it again.") from error
    for name in (image, label):
        if not isinstance(arrays.get(name), np.ndarray):
            raise DataError(f"{path} has no array {name!r}. Name the two arrays with image= and label=.")
    x, y = arrays[image], arrays[label].reshape(-1)
    if x.ndim != 4 or x.dtype != np.uint8 or y.shape != x.shape[3:] or y.dtype.kind not in "iuf":
        raise DataError(f"{path}: {image} has shape {x.shape} ({x.dtype}) and {label} {arrays[label].shape} ({y.dtype}); "
                        f"expected [h,w,c,n] of uint8 and n numbers.")
    if y.size and y.min() >= 1 and y.max() == 10:
        y = y % 10
    return _checked(x.transpose(3, 2, 0, 1), y, (), path)


def stl10(folder: PathLike) -> tuple[Images, Images]:
    """Read STL-10's binary folder: 5,000 and 8,000 images of 3 x 96 x 96; pass both to ``richter.tasks.split``."""
    place = Path(folder)
    listed = place / "class_names.txt"
    names = raw(listed).decode("utf-8", "replace").split() if listed.is_file() else []
    both = []
    for part in ("train", "test"):
        x = np.frombuffer(raw(place / f"{part}_X.bin"), np.uint8)
        y = np.frombuffer(raw(place / f"{part}_y.bin"), np.uint8).astype(np.int64)
        if y.size == 0 or x.size != y.size * 27648:
            raise DataError(f"{place / part}_X.bin has {x.size:,} bytes and {part}_y.bin {y.size:,}: each label needs an image "
                            f"of 27,648 bytes (3 x 96 x 96). One of them is cut short or not of STL-10.")
        if y.min() < 1 or y.max() > 10:
            raise DataError(f"{place / part}_y.bin has labels from {y.min()} to {y.max()}; STL-10's are 1 to 10.")
        # the file stores columns first
        both.append(Images(x.reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2), y - 1, tuple(names)))
    return both[0], both[1]


def _checked(x: NDArray[np.uint8], y: NDArray[Any], classes: tuple[str, ...], path: PathLike) -> Images:
    """Images and labels as tensors, checked."""
    if len(y) == 0 or 0 in x.shape:
        raise DataError(f"{path} holds no images (shape {x.shape}).")
    if not np.array_equal(y, np.floor(y)) or y.min() < 0 or y.max() > 2**31:
        raise DataError(f"{path} has labels that are not class ids 0, 1, ...: from {y.min()} to {y.max()}.")
    return Images(x, y.astype(np.int64), classes)
