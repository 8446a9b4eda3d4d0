"""Files of one's own are read as data and never run."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from richter import tasks
from richter.core import DataError
from richter.tasks import files
from samples import idx_of, mat_of, pixels, png_of, program

FUZZ = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "float32", "float64"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_is_read(tmp_path: Path, dtype: str, pack: Callable[[bytes], bytes]) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    (tmp_path / "x").write_bytes(pack(idx_of(array)))
    found = files.idx(tmp_path / "x")
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_cifar_binary_is_read(tmp_path: Path) -> None:
    x, y = pixels(5, 3, 32, 32), np.array([0, 9, 3, 3, 1], dtype=np.uint8)
    ten, hundred = tmp_path / "ten", tmp_path / "hundred"
    ten.write_bytes(np.concatenate([y[:, None], x.reshape(5, -1)], 1).tobytes())
    hundred.write_bytes(np.concatenate([y[:, None], 90 + y[:, None], x.reshape(5, -1)], 1).tobytes())
    found = files.cifar_binary([ten, ten])
    assert np.array_equal(found.x, np.concatenate([x, x]))
    assert found.y.tolist() == [0, 9, 3, 3, 1] * 2
    assert files.cifar_binary(hundred, classes=100).y.tolist() == [90, 99, 93, 93, 91]
    with pytest.raises(DataError, match="not a multiple of 3073"):
        files.cifar_binary(hundred)
    (tmp_path / "label").write_bytes(bytes([77]) * 3073)
    with pytest.raises(DataError, match="label 77 was read, beyond the 10 classes"):
        files.cifar_binary(tmp_path / "label")
    for wrong in ([], [tmp_path / "absent"]):
        with pytest.raises(DataError, match=r"no files|cannot be read"):
            files.cifar_binary(wrong)
    with pytest.raises(DataError, match="give 10 or 100"):
        files.cifar_binary(ten, classes=20)


def test_svhn_is_read(tmp_path: Path) -> None:
    x, y = pixels(32, 32, 3, 4), np.array([[1], [10], [5], [9]], dtype=np.uint8)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(mat_of(X=x, y=y))
    found = files.mat(path)
    assert found.x.shape == (4, 3, 32, 32)
    assert found.x[2, 1, 5, 7] == x[5, 7, 1, 2]
    assert found.y.tolist() == [1, 0, 5, 9]
    path.write_bytes(mat_of(pictures=x, kinds=y))
    assert np.array_equal(files.mat(path, image="pictures", label="kinds").x, found.x)
    for data, message in ((mat_of(X=x), "no array 'y'"), (mat_of(X=x, y=y[:3]), r"expected \[h,w,c,n\]"),
                          (mat_of(X=x.astype(float), y=y), "float64"), (mat_of(X=x, y=y + 0.5), "not class ids"),
                          (mat_of(X=x, y=y)[:300], "cannot be read"), (b"MATLAB 7.3 MAT-file" + bytes(200), "version 7.3"),
                          (mat_of(X=np.array([{"a": 1}], dtype=object), y=y), "expected")):
        path.write_bytes(data)
        with pytest.raises(DataError, match=message):
            files.mat(path)


def test_stl10_is_read(tmp_path: Path) -> None:
    x = pixels(3, 3, 96, 96)  # as stored: columns first
    for part in ("train", "test"):
        (tmp_path / f"{part}_X.bin").write_bytes(x.tobytes())
        (tmp_path / f"{part}_y.bin").write_bytes(bytes([1, 10, 2]))
    (tmp_path / "class_names.txt").write_text("airplane\nbird\n")
    train, _ = files.stl10(tmp_path)
    assert train.x[1, 2, 10, 90] == x[1, 2, 90, 10]
    assert train.y.tolist() == [0, 9, 1]
    assert train.classes == ("airplane", "bird")
    assert tasks.split(*files.stl10(tmp_path)).x.shape == (3, 3, 96, 96)
    (tmp_path / "test_y.bin").write_bytes(bytes([1, 11, 2]))
    with pytest.raises(DataError, match="labels from 1 to 11"):
        files.stl10(tmp_path)
    (tmp_path / "test_y.bin").write_bytes(bytes([1, 2]))
    with pytest.raises(DataError, match=r"82,944 bytes and test_y.bin 2"):
        files.stl10(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        files.stl10(tmp_path / "nowhere")


def test_a_folder_of_images_is_read(tmp_path: Path) -> None:
    x = pixels(4, 6, 5, 3)
    for i, name in enumerate(("cat/1.png", "cat/2.PNG", "dog/1.png", "dog/2.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png_of(x[i]))
    (tmp_path / "cat" / "notes.csv").write_text("not a picture")
    found = files.image_folder(tmp_path)
    assert np.array_equal(found.x, x.transpose(0, 3, 1, 2))
    assert (found.y.tolist(), found.classes) == ([0, 0, 1, 1], ("cat", "dog"))
    assert files.image_folder(tmp_path, size=8).x.shape == (4, 3, 8, 8)
    assert files.image_folder(tmp_path, size=(4, 7), grey=True).x.shape == (4, 1, 4, 7)
    by_name = files.image_folder(tmp_path / "dog", labels={"2.png": 5, "1.png": 2})
    assert (by_name.y.tolist(), by_name.x[1, 0, 0, 0]) == ([5, 2], x[2, 0, 0, 0])
    for labels, message in (({"3.png": 0}, "cannot be read"), ({"1.png": 0.5}, "label 0.5"), ({}, "holds no pictures")):
        with pytest.raises(DataError, match=message):
            files.image_folder(tmp_path / "dog", labels=labels)
    (tmp_path / "dog" / "3.png").write_bytes(png_of(pixels(9, 9, 3)))
    with pytest.raises(DataError, match=r"3.png is 9 x 9 and the first is 6 x 5.*size="):
        files.image_folder(tmp_path)
    (tmp_path / "dog" / "3.png").write_bytes(png_of(np.zeros((6, 5), dtype=np.uint16)))
    with pytest.raises(DataError, match=r"3.png: a picture has more than 8 bits"):
        files.image_folder(tmp_path)
    (tmp_path / "dog" / "3.png").unlink()
    with pytest.raises(DataError, match="at least one pixel"):
        files.image_folder(tmp_path, size=0)
    (tmp_path / "emu").mkdir()
    with pytest.raises(DataError, match="the folder 'emu' holds no picture"):
        files.image_folder(tmp_path)
    with pytest.raises(DataError, match="holds no pictures"):
        files.image_folder(tmp_path / "emu")
    with pytest.raises(DataError, match="is not a folder"):
        files.image_folder(tmp_path / "absent")


def test_a_hugging_face_set_is_read() -> None:
    datasets = pytest.importorskip("datasets")
    x = pixels(3, 4, 4, 3)
    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=["a", "b"]),
                                  "text": datasets.Value("string")})
    made = datasets.Dataset.from_dict({"img": [Image.fromarray(a) for a in x], "kind": [1, 0, 1], "text": ["u", "v", "w"]},
                                      features)
    found = files.hugging_face(made, image="img", label="kind")
    assert np.array_equal(found.x, x.transpose(0, 3, 1, 2))
    assert (found.y.tolist(), found.classes) == ([1, 0, 1], ("a", "b"))
    assert files.hugging_face(made, "img", "kind", size=2, grey=True).x.shape == (3, 1, 2, 2)
    arrays = datasets.Dataset.from_dict({"image": x.tolist(), "label": [0, 1, 2]})
    assert np.array_equal(files.hugging_face(arrays).x, found.x)
    for data, columns, message in (
            (made, ("image", "kind"), "no column 'image'; it has img, kind, text"), (made, ("img", "text"), "label 'u'"),
            (made, ("text", "kind"), "row 0 is not an image"),
            (datasets.DatasetDict(train=made), ("img", "kind"), "splits, train"),
            (made.select([]), ("img", "kind"), "holds no images"), (made.to_iterable_dataset(), ("img", "kind"), "with a length"),
            (datasets.Dataset.from_dict({"img": (x / 255).tolist(), "kind": [0, 1, 0]}), ("img", "kind"), "float")):
        with pytest.raises(DataError, match=message):
            files.hugging_face(data, *columns)


class Trap:
    """Unpickling it runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def readers(path: Path) -> list[Callable[[], Any]]:
    return [lambda: files.idx(path), lambda: files.idx_images(path, path), lambda: files.cifar_binary(path),
            lambda: files.cifar_binary([path], classes=100), lambda: files.mat(path), lambda: files.picture(path),
            lambda: files.image_folder(path.parent.parent), lambda: files.stl10(path.parent)]


WHOLE = {"idx": idx_of(pixels(3, 4, 4)), "idx gz": gzip.compress(idx_of(pixels(3, 4, 4))),
         "mat": mat_of(X=pixels(4, 4, 3, 2), y=np.array([1, 2])), "png": png_of(pixels(4, 4, 3)),
         "cifar": bytes([3]) + pixels(3072).tobytes()}


@FUZZ
@given(st.sampled_from(sorted(WHOLE)), st.integers(0, 4000), st.binary(max_size=60), st.booleans())
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, kind: str, cut: int, noise: bytes,
                                       keep: bool) -> None:
    whole = WHOLE[kind]
    cut %= len(whole) + 1
    place = tmp_path_factory.mktemp("fuzz") / "class"
    place.mkdir()
    for name in ("x.png", "train_X.bin", "train_y.bin"):
        (place / name).write_bytes(whole[:cut] + noise + (whole[cut + len(noise):] if keep else b""))
    for read in readers(place / "x.png"):
        try:
            read()
        except DataError:
            continue
    shutil.rmtree(place.parent)


@FUZZ
@given(st.binary(min_size=1, max_size=40), st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), min_size=1, max_size=9),
       st.sampled_from([8, 9, 11, 12, 13, 14]))
def test_any_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, shape: list[int],
                                       code: int) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x"
    path.write_bytes(struct.pack(f">BBBB{len(shape)}I", 0, 0, code, len(shape), *shape) + noise)
    try:
        found = files.idx(path)
    except DataError:
        return
    assert (found.shape, found.nbytes) == (tuple(shape), len(noise))


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, place = tmp_path / "run", tmp_path / "folder" / "class"
    place.mkdir(parents=True)
    program(tmp_path / "bin", "gs", f"touch {mark}")  # what a decoder of PostScript starts
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    npy = io.BytesIO()
    np.save(npy, np.array([Trap(mark)], dtype=object), allow_pickle=True)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    for data in (pickle.dumps(Trap(mark)), npy.getvalue(), postscript, b"import os; os.abort()"):
        (place / "x.png").write_bytes(data)
        for read in readers(place / "x.png"):
            with pytest.raises(DataError):
                read()
    assert not mark.exists()
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()  # the trap works
