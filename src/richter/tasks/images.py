"""Images with class labels, as tensors: the data sets of the papers. ``richter data`` fetches all but ``digits`` once."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from richter.core import DataError, SelectionError
from richter.tasks import files
from richter.tasks.files import Images
from richter.tasks.store import need

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Split(NamedTuple):
    """Inputs and class ids [n] (or targets [n,1]), for training and for testing."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def mnist(n: int | None = None, n_test: int | None = None, *, seed: int = 0, standardise: bool = True, flat: bool = False,
          dtype: torch.dtype = torch.float32) -> Split:
    """Load handwritten digits, 60,000 and 10,000 of 1 x 28 x 28; options as in ``split``."""
    return split(*_idx_pair(need("mnist")), n, n_test, seed=seed, standardise=standardise, flat=flat, dtype=dtype)


def fashion_mnist(n: int | None = None, n_test: int | None = None, *, seed: int = 0, standardise: bool = True,
                  flat: bool = False, dtype: torch.dtype = torch.float32) -> Split:
    """Load images of clothes, 60,000 and 10,000 of 1 x 28 x 28; options as in ``split``."""
    return split(*_idx_pair(need("fashion_mnist")), n, n_test, seed=seed, standardise=standardise, flat=flat, dtype=dtype)


def cifar10(n: int | None = None, n_test: int | None = None, *, seed: int = 0, standardise: bool = True, flat: bool = False,
            dtype: torch.dtype = torch.float32) -> Split:
    """Load small photographs, 50,000 and 10,000 of 3 x 32 x 32 (``CIFAR10`` names the classes); options as in ``split``."""
    folder = need("cifar10")
    train = files.cifar_binary([folder / f"data_batch_{i}.bin" for i in range(1, 6)])
    test = files.cifar_binary(folder / "test_batch.bin")
    if (len(train.y), len(test.y)) != (50_000, 10_000):
        raise DataError(f"{folder} holds {len(train.y):,} and {len(test.y):,} images, expected 50,000 and 10,000. Run "
                        f"`richter data fetch cifar10`.")
    return split(train._replace(classes=CIFAR10), test._replace(classes=CIFAR10), n, n_test, seed=seed, standardise=standardise,
                 flat=flat, dtype=dtype)


def mnist_5k(test: float = 0.2, seed: int = 0, *, standardise: bool = True, flat: bool = True,
             dtype: torch.dtype = torch.float32) -> Split:
    """Load 500 MNIST digits of each class, split at random and balanced over classes; ``test``: the share of test images."""
    _share("mnist_5k", test)
    import pandas as pd
    path = need("mnist_5k") / "mnist_5k.csv.gz"
    try:
        table = pd.read_csv(path, header=None, dtype=np.uint8).to_numpy()
        x, y = table[:, :-1].reshape(5000, 1, 28, 28), table[:, -1].astype(np.int64)
    except (OSError, EOFError, ValueError, OverflowError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}). Run `richter data fetch mnist_5k`.") from error
    order = balanced(y, round(5000 * (1 - test)), seed)
    rest = np.setdiff1d(np.arange(5000), order)
    rest = np.random.default_rng((seed, 1)).permutation(rest)
    return split(Images(x[order], y[order]), Images(x[rest], y[rest]), standardise=standardise, flat=flat, dtype=dtype)


def digits(test: float = 0.2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Split:
    """Load scikit-learn's digits, 1,797 of 8 x 8, flattened and standardised by one mean and deviation; shuffled by ``seed``."""
    from sklearn.datasets import load_digits
    _share("digits", test)
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = (x[order] - x.mean()) / x.std(), y[order]
    cut = round(len(x) * (1 - test))
    inputs, labels = torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=torch.long)
    return Split(inputs[:cut], labels[:cut], inputs[cut:], labels[cut:])


def split(train: Images, test: Images, n: int | None = None, n_test: int | None = None, *, seed: int = 0,
          standardise: bool = True, flat: bool = False, dtype: torch.dtype = torch.float32) -> Split:
    """Convert raw images to tensors for training and testing.

    ``n``, ``n_test``: sizes of class-balanced subsets, drawn and shuffled by ``seed`` (a smaller one is part of a larger one);
    None: all images in their own order. ``standardise``: by one mean and deviation over all pixels of the whole of ``train``, for
    any ``n``; otherwise values stay in [0, 1]. ``flat``: [n, c*h*w], otherwise [n,c,h,w].
    """
    if train.x.shape[1:] != test.x.shape[1:]:
        raise DataError(f"training images are {train.x.shape[1:]} and test images {test.x.shape[1:]} (c, h, w): one network "
                        f"cannot take both. Read both with the same size.")
    if not dtype.is_floating_point:
        raise SelectionError(f"dtype={dtype}: inputs of a network are real numbers; give torch.float32 or torch.float64.")
    mean, deviation = _moments(train.x) if standardise else (0.0, 1.0)
    parts: list[Tensor] = []
    for images, count, stream in ((train, n, 0), (test, n_test, 1)):
        rows = slice(None) if count is None or count == len(images.y) else balanced(images.y, count, seed, stream)
        x = torch.from_numpy(np.ascontiguousarray(images.x[rows])).to(dtype).div_(255).sub_(mean).div_(deviation)
        parts += [x.flatten(1) if flat else x, torch.from_numpy(images.y[rows].astype(np.int64))]
    return Split(*parts)


def balanced(y: NDArray[np.integer], n: int, seed: int, stream: int = 0) -> NDArray[np.intp]:
    """Return indices of n examples in random order, with equal numbers per class (up to one)."""
    classes, counts = np.unique(y, return_counts=True)
    most = int(counts.min()) * len(classes)
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 1 <= n <= most:
        raise SelectionError(f"{n!r} examples were asked for, equally many of each of {len(classes)} classes: between 1 and "
                             f"{most:,} can be given (class {classes[counts.argmin()]} has {counts.min():,}). None gives all "
                             f"{len(y):,}.")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise SelectionError(f"seed={seed!r}: a whole number from 0 on is needed.")
    draw = np.random.default_rng((seed, stream))
    queues = [draw.permutation(np.flatnonzero(y == c)) for c in draw.permutation(classes)]
    each, more = divmod(int(n), len(classes))
    chosen = np.concatenate([queue[: each + (i < more)] for i, queue in enumerate(queues)])
    return draw.permutation(chosen)


def _moments(x: NDArray[np.uint8]) -> tuple[float, float]:
    """Exact mean and deviation of all pixels / 255, from the counts of the 256 values."""
    count = np.zeros(256, dtype=np.int64)
    for part in np.array_split(x.reshape(-1), max(1, x.size >> 24)):
        count += np.bincount(part, minlength=256)
    value = np.arange(256) / 255
    mean = float(count @ value / count.sum())
    deviation = float(np.sqrt(count @ (value - mean) ** 2 / count.sum()))
    return mean, deviation or 1.0


def _share(name: str, test: float) -> None:
    """Raise an error unless the share of test examples is valid."""
    if not 0 < test < 1:
        raise SelectionError(f"{name}(test={test}): a share between 0 and 1 is needed.")


def _idx_pair(folder: Path) -> tuple[Images, Images]:
    """Training and test images in IDX format."""
    train, test = (files.idx_images(folder / f"{part}-images-idx3-ubyte", folder / f"{part}-labels-idx1-ubyte")
                   for part in ("train", "t10k"))
    return train, test


TASKS: tuple = (digits, mnist, mnist_5k, fashion_mnist, cifar10)
