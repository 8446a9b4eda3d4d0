"""Images in common file formats as arrays of one size: single files, folders, Hugging Face data sets."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from richter.core import DataError
from richter.core.values import progress

PathLike = str | os.PathLike[str]
Size = int | tuple[int, int] | None  # one side, or (height, width); None: unchanged

_PICTURES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".ppm": "PPM", ".pgm": "PPM", ".bmp": "BMP", ".gif": "GIF",
             ".webp": "WEBP", ".tif": "TIFF", ".tiff": "TIFF"}


class Images(NamedTuple):
    """Raw images: x uint8 [n,c,h,w], class ids y [n], and the names of the classes if known."""

    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    classes: tuple[str, ...] = ()


def image_folder(folder: PathLike, size: Size = None, *, grey: bool = False,
                 labels: Mapping[str, int] | None = None) -> Images:
    """Read images from one subfolder per class (GTSRB), or the files to which ``labels`` assigns a class id (CelebA).

    ``size``: one side or (height, width), to which every image is resized; None: all images must have one size.
    """
    place = Path(folder)
    if not place.is_dir():
        raise DataError(f"{place} is not a folder.")
    classes: tuple[str, ...] = ()
    if labels is not None:
        chosen = [(place / name, k) for name, k in labels.items()]
    else:
        classes = tuple(sorted(p.name for p in place.iterdir() if p.is_dir()))
        chosen = [(p, k) for k, name in enumerate(classes) for p in sorted((place / name).iterdir())
                  if p.suffix.lower() in _PICTURES]
        empty = sorted(set(range(len(classes))) - {k for _, k in chosen})
        if classes and chosen and empty:
            raise DataError(f"{place}: the folder {classes[empty[0]]!r} holds no picture ({', '.join(_PICTURES)}), so its class "
                            f"has no example. Remove it or fill it.")
    if not chosen:
        raise DataError(f"{place} holds no pictures: expected one subfolder for each class, with {', '.join(_PICTURES)} in it; "
                        f"or name the files with labels={{'a.jpg': 0, ...}}.")
    bar = progress(chosen, title=f"reading {place.name}")
    return _stacked(((str(path), picture(path, size, grey), k) for path, k in bar), classes, place)


def hugging_face(dataset: Any, image: str = "image", label: str = "label", size: Size = None, *,
                 grey: bool = False) -> Images:
    """Read one split of a ``datasets.Dataset``, with the names of its image and label columns."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, Mapping) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        splits = f" Give one of its splits, {', '.join(columns)}: dataset['train']." if isinstance(columns, Mapping) else ""
        raise DataError(f"hugging_face needs one datasets.Dataset with a length, not a {type(dataset).__name__}.{splits}")
    for name in (image, label):
        if columns is not None and name not in columns:
            raise DataError(f"the data set has no column {name!r}; it has {', '.join(columns)}. Give image= and label=.")
    names = getattr((getattr(dataset, "features", None) or {}).get(label), "names", None) or ()
    def rows() -> Iterable[tuple[str, NDArray[np.uint8], Any]]:
        for i in progress(range(len(dataset)), title="reading images"):
            row = dataset[i]
            yield f"row {i}", _from_object(row[image], f"row {i}", size, grey), row[label]
    return _stacked(rows(), tuple(names), "the data set")


def picture(path: PathLike, size: Size = None, grey: bool = False) -> NDArray[np.uint8]:
    """Read one image file as [h,w,3], or [h,w,1] if ``grey``."""
    from PIL import Image
    allowed = sorted(set(_PICTURES.values()))  # other formats, e.g. PostScript, would start a program
    try:
        with Image.open(io.BytesIO(raw(path)), formats=allowed) as opened:
            return _pixels(opened, size, grey)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # any error that a damaged file can cause
        raise DataError(f"{path} is not a picture that can be read ({type(error).__name__}: {error}). Remove it, or download it "
                        f"again; readable are {', '.join(allowed)}.") from error


def _from_object(value: Any, what: str, size: Size, grey: bool) -> NDArray[np.uint8]:
    """Convert a PIL image or an array [h,w] or [h,w,c]."""
    from PIL import Image
    try:
        if not isinstance(value, Image.Image):
            array = np.asarray(value)
            if array.dtype != np.uint8 and array.dtype.kind in "iu" and array.size and 0 <= array.min() <= array.max() <= 255:
                array = array.astype(np.uint8)
            if array.dtype != np.uint8:
                raise ValueError(f"values are {array.dtype}, expected whole numbers from 0 to 255")
            value = Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)
        return _pixels(value, size, grey)
    except DataError as error:
        raise DataError(f"{what}: {error}") from error
    except Exception as error:  # the column may contain anything
        raise DataError(f"{what} is not an image ({type(value).__name__}; {error}). Name the column with image=.") from error


def _pixels(opened: Any, size: Size, grey: bool) -> NDArray[np.uint8]:
    """Pixels [h, w, channels] of a picture in the wanted size and colours."""
    from PIL import Image
    if opened.mode.startswith(("I", "F")):
        raise DataError(f"a picture has more than 8 bits for each pixel (mode {opened.mode}); converting would cut them off. "
                        f"Save it with 8 bits.")
    converted = opened.convert("L" if grey else "RGB")
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        if min(height, width) < 1:
            raise DataError(f"size={size}: a side of at least one pixel is needed.")
        if converted.size != (width, height):
            converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(converted, dtype=np.uint8)
    return array[:, :, None] if grey else array


def _stacked(rows: Iterable[tuple[str, NDArray[np.uint8], Any]], classes: tuple[str, ...], owner: object) -> Images:
    """Pictures of one size and their class ids as tensors."""
    xs: list[NDArray[np.uint8]] = []
    ys: list[int] = []
    for what, x, y in rows:
        if xs and x.shape != xs[0].shape:
            raise DataError(f"{what} is {x.shape[0]} x {x.shape[1]} and the first is {xs[0].shape[0]} x {xs[0].shape[1]}: a "
                            f"tensor needs one size. Give size=.")
        if isinstance(y, bool) or not hasattr(y, "__index__") or y.__index__() < 0:
            raise DataError(f"{what} has the label {y!r}; a class id, 0 or more, is needed. Name the label column with label=.")
        xs.append(x)
        ys.append(y.__index__())
    if not xs:
        raise DataError(f"{owner} holds no images.")
    return Images(np.stack(xs).transpose(0, 3, 1, 2), np.array(ys, dtype=np.int64), classes)


def raw(path: PathLike) -> bytes:
    """Read the contents of a file."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error


def contents(path: PathLike) -> bytes:
    """Read the contents of a file, unpacked if it is gzip."""
    data = raw(path)
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is gzip, cut short or damaged ({error}). Download it again.") from error
