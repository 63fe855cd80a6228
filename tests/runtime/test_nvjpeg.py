"""Decoding on a GPU, on a CPU: all of it but NVIDIA's library, in whose place Pillow decodes."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from max.driver import CPU, Buffer
from max.graph import DeviceRef
from PIL import Image

from maxvision.common.errors import DeviceError, ImageError
from maxvision.runtime import classifier, executor, jpeg, nvjpeg, pipeline
from maxvision.runtime.jpeg import Jpeg
from maxvision.runtime.nvjpeg import Decoder
from maxvision.runtime.pipeline import Item, Pipeline, Times
from maxvision.runtime.preprocess import Preprocess, read_image
from tests.runtime.standin import Pillow, decoding

PLAIN = Preprocess(64, 64, 72)
EXIF = 0x0112


def levels(height: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (height, width, 3), np.uint8)
    made[:, ::5], made[::7] = 255, 0  # so that sums overshoot on both sides
    return made


def encoded(
    height: int = 48, width: int = 40, turn: int = 0, mode: str = "RGB", **how: Any
) -> bytes:
    image = Image.fromarray(levels(height, width)).convert(mode)
    if turn:
        exif = Image.Exif()
        exif[0x010F] = "a camera"
        exif[EXIF] = turn
        how["exif"] = exif
    file = io.BytesIO()
    image.save(file, "JPEG", **how)
    return file.getvalue()


@pytest.fixture(scope="module")
def executable() -> Any:
    return executor.load(partial(nvjpeg.graph, DeviceRef.CPU(), 64), CPU())


def decoder(executable: Any, preprocess: Preprocess = PLAIN, library: Any = None) -> Decoder:
    return Decoder(CPU(), preprocess, executable, library or Pillow())


def prepared(using: Decoder, pictures: Sequence[Any]) -> np.ndarray:
    with using(pictures) as batch:
        assert not batch.refused
        made = np.full(batch.shape, 7, np.uint8)
        batch.write(Buffer.from_numpy(made))
    return made


# --- headers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(9))
@pytest.mark.parametrize("how", [{}, {"subsampling": 0}, {"subsampling": 1}, {"quality": 30}])
def test_headers_say_what_pillow_says(turn: int, how: dict[str, Any]) -> None:
    for height, width in ((48, 40), (1, 33), (70, 8)):
        file = encoded(height, width, turn, **how)
        found = jpeg.read(file, PLAIN)
        assert found is not None and (found.height, found.width) == (height, width)
        assert found.orientation == (turn or 1)
        assert found.upright == read_image(file).size[::-1]
        assert jpeg.pixels(file) == height * width


def test_grey_and_exif_without_an_orientation() -> None:
    assert jpeg.read(encoded(mode="L"), PLAIN)
    exif = Image.Exif()
    exif[0x010F] = "a camera"
    found = jpeg.read(encoded(exif=exif), PLAIN)
    assert found and found.orientation == 1
    big = encoded(exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0")
    found = jpeg.read(big, PLAIN)
    assert found and found.orientation == 6 == Image.open(io.BytesIO(big)).getexif()[EXIF]


def test_what_pillow_has_to_read_is_left_to_it() -> None:
    file = encoded()
    picture = io.BytesIO()
    Image.fromarray(levels(40, 40)).save(picture, "PNG")
    left = {
        "progressive": encoded(progressive=True),
        "CMYK": encoded(mode="CMYK"),
        "RGB": encoded(keep_rgb=True),
        "4:1:1": file[: (at := file.index(b"\xff\xc0") + 11)] + b"\x41" + file[at + 1 :],
        "cut off": file[: len(file) * 2 // 3],
        "a header alone": file[: file.index(b"\xff\xda") + 5],
        "half of a header": file[: file.index(b"\xff\xc0") + 6],
        "an odd orientation": encoded(turn=9),
        "XMP": encoded(xmp=b"<x:xmpmeta tiff:Orientation='6'/>"),
        "PNG": picture.getvalue(),
        "no file": b"",
        "too large a reduction": encoded(20 * 72, 20 * 72),
    }
    for what, data in left.items():
        assert jpeg.read(data, PLAIN) is None, what
    for data in (file, file + b"behind it"):
        assert jpeg.read(data, PLAIN)
    for cut in range(0, len(file), 7):  # no header is cut so that it raises
        jpeg.read(file[:cut], PLAIN)
    assert not jpeg.takes(Preprocess(resample=Image.Resampling.LANCZOS))
    assert not jpeg.takes(Preprocess(fast=True))


# --- pixels -----------------------------------------------------------------------------------

PREPROCESSES = {
    "edge": PLAIN,
    "bilinear": Preprocess(64, 64, 72, Image.Resampling.BILINEAR),
    "both": Preprocess(64, 64, (64, 64)),
    "other shape": Preprocess(40, 64, (50, 70)),
    "as it is": Preprocess(64, 48, None),
    "border": Preprocess(64, 64, 33),
}


@pytest.mark.parametrize("name", PREPROCESSES)
def test_pixels_are_those_of_the_cpu(executable: Any, name: str) -> None:
    preprocess = PREPROCESSES[name]
    rng = np.random.default_rng(len(name))
    sizes = [
        (64, 64),
        (72, 72),
        (1, 1),
        (1, 9),
        (300, 5),
        (5, 300),
        (128, 64),
        (129, 64),
        (64, 129),
    ]
    sizes += [(72, 100), (100, 72), *map(tuple, rng.integers(1, 400, (25, 2)).tolist())]
    files = [encoded(*size, turn=i % 9, quality=95) for i, size in enumerate(sizes)]
    pictures: list[Any] = []
    for file in files:
        found = jpeg.read(file, preprocess)
        pictures.append(found or preprocess(file))
    assert sum(isinstance(each, Jpeg) for each in pictures) > len(files) // 2
    made = prepared(decoder(executable, preprocess), pictures)
    for size, file, pixels in zip(sizes, files, made, strict=True):
        np.testing.assert_array_equal(pixels, preprocess(file), f"{size}")


def test_batches_under_way_do_not_disturb_each_other(executable: Any) -> None:
    using = decoder(executable)
    files = [jpeg.read(encoded(40 + i, 50), PLAIN) for i in range(12)]
    expected = [PLAIN(each.file) for each in files if each]
    wrong = []

    def run(first: int) -> None:
        for i in range(first, first + 6):
            some = [files[i % 12], files[(i + 5) % 12]]
            made = prepared(using, some)
            wrong.extend(
                i for a, b in zip(made, (i, i + 5), strict=True) if (a != expected[b % 12]).any()
            )

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_what_cannot_be_decoded_is_replaced_or_left_out(executable: Any) -> None:
    file = encoded()
    good = jpeg.read(file, PLAIN)
    bad = Jpeg(file[: len(file) // 2], 48, 40)
    other = Jpeg(file, 47, 40)  # of another size than its header said
    ready = np.full((64, 64, 3), 5, np.uint8)
    with decoder(executable)([bad, good, ready, other, bad]) as batch:
        assert batch.refused == [0, 3, 4] and good is not None
        batch.replace(0, np.full((64, 64, 3), 9, np.uint8))
        batch.replace(3, None)
        batch.replace(4, None)
        assert len(batch) == 3 and batch.shape == (3, 64, 64, 3)
        made = np.zeros((5, 64, 64, 3), np.uint8)
        batch.write(Buffer.from_numpy(made))
    assert (made[0] == 9).all() and (made[2] == 5).all() and not made[3:].any()
    np.testing.assert_array_equal(made[1], PLAIN(file))


def test_nvimagecodec_on_the_cpu(executable: Any) -> None:
    """Its own way of calling, with its decoder for CPUs, where the extra is installed."""
    pytest.importorskip("nvidia.nvimgcodec")
    using = decoder(executable, library=nvjpeg.NvImageCodec(CPU()))
    files = [encoded(48 + i, 90, turn=i % 9, quality=90) for i in range(9)]
    same = [encoded(48, 90, quality=quality) for quality in (90, 30, 60)]  # of one size
    for some in (files, files[3:5], files[::-1], same, same[::-1], same[1:], same[::-1]):
        pictures = [jpeg.read(file, PLAIN) for file in some]
        made = prepared(using, pictures)
        for file, pixels in zip(some, made, strict=True):
            assert np.abs(pixels.astype(int) - PLAIN(file)).max() <= 1
    with using([Jpeg(files[0][:700], 48, 90), Jpeg(b"nothing", 48, 90)]) as batch:
        assert batch.refused == [0, 1]


# --- a model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> classifier.Classifier:
    return decoding("resnet-cifar10", batch_size=4)


@pytest.mark.parametrize("many", [2000, 1])
def test_a_model_answers_as_with_the_cpu(
    model: classifier.Classifier, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    """Files are read by this process, and by others."""
    monkeypatch.setattr(pipeline, "MANY", many)
    files = [encoded(40 + 3 * i, 60, turn=i % 9) for i in range(7)]
    files[2] = encoded(progressive=True)
    files[4] = files[4].replace(b"\xff\xda", b"\xff\xd8", 1)  # no scan: Pillow says so
    sources = []
    for i, file in enumerate(files):
        sources.append(str(tmp_path / f"{i}.jpg"))
        (tmp_path / f"{i}.jpg").write_bytes(file)
    damaged = tmp_path / "damaged.jpg"
    damaged.write_bytes(files[0][:-400] + files[0][-2:])  # its header is whole
    items = [Item(str(each), str(each)) for each in [*sources, damaged, tmp_path / "none.jpg"]]
    times = Times()
    with Pipeline(model, len(items)) as opened:
        found = [each for batch in opened.answers(items, 1, times) for each in batch]
    using, model.decoder = model.decoder, None
    with Pipeline(model, len(items)) as opened:
        expected = [each for batch in opened.answers(items, 1, Times()) for each in batch]
    assert [each.name for each in found] == [item.name for item in items]
    assert [each.error for each in found] == [each.error for each in expected]
    assert sum(each.error is not None for each in found) >= 2
    for ours, theirs in zip(found, expected, strict=True):
        if ours.error is None:
            np.testing.assert_array_equal(ours.logits, theirs.logits)
    model.decoder = using
    assert isinstance(using, Decoder) and isinstance(using._library, Pillow)
    assert sum(using._library.calls) >= 6
    del using._library.calls[:]
    assert times.images == 7
    assert model.classify(sources[0], top_k=1)[0] == found[0].predictions[0]
    with pytest.raises(ImageError, match=r"4\.jpg"):
        model.classify([sources[0], sources[4]])


@pytest.mark.parametrize(
    ("decode", "device", "api", "said"),
    [
        ("gpu", "cpu", "cpu", "--decode gpu needs an NVIDIA GPU but the model runs on the CPU; or"),
        ("gpu", "gpu:0", "hip", "an NVIDIA GPU but this one is another"),
        ("gpu", "gpu:0", "cuda", "the package nvidia-nvimgcodec; .*nvjpeg.*--decode cpu"),
    ],
)
def test_gpu_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, decode: str, device: str, api: str, said: str
) -> None:
    monkeypatch.setattr(nvjpeg, "is_installed", lambda: False)
    with pytest.raises(DeviceError, match=said):
        nvjpeg.chosen(decode, device, api, PLAIN)
    for other in ("auto", "cpu", "fast"):
        assert not nvjpeg.chosen(other, device, api, PLAIN)


def test_auto_takes_the_gpu_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvjpeg, "is_installed", lambda: True)
    assert nvjpeg.chosen("auto", "gpu:0", "cuda", PLAIN)
    assert nvjpeg.chosen("gpu", "gpu:0", "cuda", PLAIN)
    lanczos = Preprocess(resample=Image.Resampling.LANCZOS)
    assert not nvjpeg.chosen("auto", "gpu:0", "cuda", lanczos)
    with pytest.raises(DeviceError, match="bicubic or bilinear"):
        nvjpeg.chosen("gpu", "gpu:0", "cuda", lanczos)
    with pytest.raises(DeviceError, match="runs on the CPU"):
        classifier.load("resnet-cifar10", device="cpu", decode="gpu")
