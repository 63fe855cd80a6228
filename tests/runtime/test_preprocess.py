"""Pictures of every kind against what they must look like, `Preprocess` against transformers."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from maxvision.common.errors import ImageError, ModelError
from maxvision.runtime import preprocess as module
from maxvision.runtime.preprocess import Preprocess, load_batch, read_image

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("MAXVISION_TEST_DATA", ROOT.parent / "shared" / "data"))

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
RESNET = {  # as microsoft/resnet-50 has it
    "crop_pct": 0.875, "do_normalize": True, "do_resize": True, "resample": 3, "size": 224,
    "feature_extractor_type": "ConvNextFeatureExtractor", **IMAGENET,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "resnet": RESNET,
    "cvt-384": {**RESNET, "size": {"shortest_edge": 384}},
    "convnext, its defaults": {"image_processor_type": "ConvNextImageProcessor"},
    "convnext, small": {**RESNET, "size": 33, "crop_pct": 0.9, "resample": 2},
    "vit": {"image_processor_type": "ViTImageProcessorFast", **IMAGENET},
    "vit, oblong": {
        "image_processor_type": "ViTImageProcessor", "size": {"height": 48, "width": 60},
    },
    "deit": {"image_processor_type": "DeiTFeatureExtractor"},
    "clip": {"image_processor_type": "CLIPImageProcessor"},
    "bit": {"image_processor_type": "BitImageProcessor", "size": 37, "crop_size": 32},
    "clip, crop beyond the image": {
        "image_processor_type": "CLIPImageProcessor", "size": 20,
        "crop_size": {"height": 33, "width": 26},
    },
    "clip, no resize": {
        "image_processor_type": "CLIPImageProcessor", "do_resize": False, "crop_size": 31,
    },
}  # fmt: skip


def picture(height: int = 40, width: int = 56, seed: int = 0) -> Image.Image:
    """Smooth colours, no symmetry."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def array(source: module.Source) -> np.ndarray:
    return np.asarray(read_image(source)).astype(int)


def distance(source: module.Source, expected: Image.Image | np.ndarray) -> int:
    got = array(source)
    assert got.shape == np.asarray(expected).shape
    return int(np.abs(got - np.asarray(expected).astype(int)).max())


# --- formats and modes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "options", "bound"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("TIFF", {"compression": "tiff_deflate"}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 95}, 24),
        ("JPEG", {"quality": 98}, 24),
        ("JPEG", {"quality": 98, "progressive": True}, 24),
        ("GIF", {}, 64),
    ],
)
def test_formats(form: str, options: dict[str, Any], bound: int) -> None:
    image = picture()
    assert distance(encode(image, form, **options), image) <= bound


def test_sources_are_the_same_picture(tmp_path: Path) -> None:
    image = picture()
    data = encode(image, "PNG")
    path = tmp_path / "café.png"
    path.write_bytes(data)
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    with path.open("rb") as file, os.fdopen(reader, "rb") as pipe:
        sources: list[Any] = [path, str(path), data, bytearray(data), file, pipe, image]
        sources.append(np.asarray(image))
        assert [distance(source, image) for source in sources] == [0] * len(sources)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    data = encode(picture(), form, exif=exif, **options)
    with Image.open(io.BytesIO(data)) as stored:
        expected = ImageOps.exif_transpose(stored).convert("RGB")
    assert expected.size == ((56, 40) if orientation < 5 else (40, 56))
    assert distance(data, expected) == 0
    assert distance(read_image(data), expected) == 0, "turned twice"


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "body",
    [
        b"MM\0*\xff\xff\xff\xff",  # points nowhere
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x02\0\0\0x" + bytes(7),  # orientation "x"
    ],
)
def test_damaged_exif_is_ignored(body: bytes) -> None:
    image = picture()
    assert distance(encode(image, "PNG", exif=b"Exif\0\0" + body), image) == 0


@pytest.mark.parametrize("form", ["PNG", "TIFF", "GIF", "BMP", "JPEG"])
def test_greyscale(form: str) -> None:
    grey = picture().convert("L")
    assert distance(encode(grey, form), grey.convert("RGB")) <= (8 if form == "JPEG" else 0)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "GIF", "BMP"])
def test_one_bit(form: str) -> None:
    bits = picture().convert("1")
    assert distance(encode(bits, form), bits.convert("RGB")) == 0


@pytest.mark.parametrize("form", ["PNG", "GIF", "BMP", "TIFF"])
def test_palette(form: str) -> None:
    indexed = picture().quantize(17)
    assert distance(encode(indexed, form), indexed.convert("RGB")) == 0


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_palette_with_transparency_is_laid_over_white(form: str) -> None:
    indexed = Image.new("P", (4, 2), 0)
    indexed.putpalette([200, 0, 0, 0, 0, 0])
    indexed.paste(1, (0, 0, 2, 2))
    expected = np.full((2, 4, 3), 255)
    expected[:, 2:] = (200, 0, 0)
    assert distance(encode(indexed, form, transparency=1), expected) == 0


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_laid_over_white(form: str) -> None:
    rgba = np.zeros((3, 4, 4), np.uint8)
    rgba[:, 1] = (10, 20, 30, 255)
    rgba[:, 2] = (0, 100, 200, 51)
    expected = np.full((3, 4, 3), 255)
    expected[:, 1], expected[:, 2] = (10, 20, 30), (204, 224, 244)
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    assert distance(encode(Image.fromarray(rgba), form, **options), expected) <= 1
    assert distance(rgba, expected) <= 1


def test_grey_with_alpha_and_with_a_transparent_colour() -> None:
    la = Image.fromarray(np.array([[[0, 0], [40, 255], [0, 51]]], np.uint8), "LA")
    assert array(encode(la, "PNG"))[0, :, 0].tolist() == [255, 40, 204]
    grey = Image.fromarray(np.array([[7, 8]], np.uint8))
    assert array(encode(grey, "PNG", transparency=7))[0, :, 1].tolist() == [255, 8]
    rgb = Image.new("RGB", (1, 1), (1, 2, 3))
    assert array(encode(rgb, "PNG", transparency=(1, 2, 3)))[0, 0].tolist() == [255] * 3


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_cmyk(form: str) -> None:
    """Pillow writes JPEG's CMYK inverted, as Adobe does."""
    image = picture()
    options = {"quality": 98} if form == "JPEG" else {}
    data = encode(image.convert("CMYK"), form, **options)
    assert (form == "JPEG") == (b"Adobe" in data)
    assert distance(data, image) <= (24 if form == "JPEG" else 1)


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled(form: str) -> None:
    values = np.array([[0, 255, 257, 32768, 65535]], np.uint16)
    data = encode(Image.fromarray(values), form)
    assert array(data)[0, :, 0].tolist() == [0, 1, 1, 128, 255]
    dark = np.array([[0, 200, 600]], np.uint16)  # stays dark
    assert array(encode(Image.fromarray(dark), form))[0, :, 0].tolist() == [0, 1, 2]


def test_16_bit_rgb_png() -> None:
    values = np.array([[[0, 32768, 65535], [65535, 257, 4112]]], ">u2")

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
    data += chunk(b"IDAT", zlib.compress(b"\0" + values.tobytes())) + chunk(b"IEND", b"")
    assert distance(data, np.array([[[0, 128, 255], [255, 1, 16]]])) <= 1


def tiff(rows: np.ndarray, bits: int, photometric: int, data: bytes | None = None) -> bytes:
    """A grey little-endian TIFF of one strip."""
    body = data if data is not None else rows.tobytes()
    height, width = rows.shape
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1,
            278: height, 279: len(body)}  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (
        struct.pack("<2sHI", b"II", 42, 8 + len(body))
        + body
        + struct.pack("<H", len(tags))
        + (entries + bytes(4))
    )


def test_tiff_with_white_as_zero() -> None:
    values = np.array([[0, 65535, 0x4000, 257]], "<u2")
    assert array(tiff(values, 16, 1))[0, :, 0].tolist() == [0, 255, 64, 1]
    assert array(tiff(values, 16, 0))[0, :, 0].tolist() == [255, 0, 191, 254]


def test_12_bit_tiff() -> None:
    values = np.array([[0, 4095]])
    assert array(tiff(values, 12, 1, b"\x00\x0f\xff"))[0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.4, 255.0], [0, 100, 255]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, np.nan, 1.0], [0, 0, 255]),
        ([0.0, np.inf, 1.0], [0, 255, 255]),
        ([0.0, 0.0, 0.0], [0, 0, 0]),
    ],
)
def test_float_tiff_and_arrays(values: list[float], expected: list[int]) -> None:
    row = np.array([values], np.float32)
    assert array(encode(Image.fromarray(row), "TIFF"))[0, :, 0].tolist() == expected
    for dtype in (np.float16, np.float32, np.float64):
        if max(values) < 60000:
            assert array(row.astype(dtype))[0, :, 2].tolist() == expected


def test_int_tiff_and_arrays() -> None:
    for values, expected in ([0, 7, 255], [0, 7, 255]), ([0, 257, 65535], [0, 1, 255]):
        row = np.array([values], np.int32)
        assert array(encode(Image.fromarray(row), "TIFF"))[0, :, 0].tolist() == expected
        assert array(row.astype(np.int64))[0, :, 0].tolist() == expected
    assert array(np.array([[-100, 100, 0]]))[0, :, 0].tolist() == [0, 255, 128]
    assert array(np.array([[False, True]]))[0, :, 0].tolist() == [0, 255]
    assert array(np.array([[0, 257, 65535]], np.uint16))[0, :, 0].tolist() == [0, 1, 255]


def test_array_shapes() -> None:
    rgb = np.asarray(picture())
    assert distance(rgb[:, ::-1], rgb[:, ::-1]) == 0  # strides
    assert distance(rgb[:, :, :1], np.repeat(rgb[:, :, :1], 3, 2)) == 0
    assert distance(rgb.astype(np.float32) / 255, rgb) == 0
    for bad in (np.zeros(3), np.zeros((3, 8, 8)), np.zeros((0, 4)), np.zeros((1, 8, 8, 3))):
        with pytest.raises(ImageError, match=r"image: an array of shape .*; pass .* \[H, W\]"):
            read_image(bad)
    with pytest.raises(ImageError, match="dtype is complex64"):
        read_image(np.zeros((2, 2), np.complex64))


def test_first_picture_of_an_animation_and_of_pages() -> None:
    red, blue = Image.new("RGB", (8, 6), (255, 0, 0)), Image.new("RGB", (8, 6), (0, 0, 255))
    for form, options in ("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {}):
        data = encode(red, form, save_all=True, append_images=[blue, red], **options)
        assert distance(data, red) == 0, form


# --- bad input --------------------------------------------------------------------------------


def test_one_pixel() -> None:
    assert Preprocess()(encode(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG")).shape == (224, 224, 3)


def test_files_that_are_no_picture(tmp_path: Path) -> None:
    def refused(name: str, match: str, data: bytes | None = None) -> None:
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ImageError, match=match) as caught:
            read_image(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ") and "; " in message and "\n" not in message

    refused("missing.jpg", "no such file")
    refused("empty.jpg", "the file is empty", b"")
    refused("text.jpg", "this is text and not a JPEG, PNG", "Grüße, this is no picture\n".encode())
    refused("half.jpg", "cut off", b"\xff\xd8\xff\xe0\0\x10JF")
    refused("photo.heic", "this is HEIC", b"\0\0\0\x18ftypheic\0\0\0\0")
    refused("noise.png", "this is not a picture that can be read", bytes(range(128)))
    refused("pixmap.ppm", "JPEG, PNG, WebP, GIF, BMP or TIFF", encode(picture(), "PPM"))
    refused("nul\0.jpg", "cannot be opened")
    refused("n" * 300, "cannot be opened")
    (tmp_path / "folder.jpg").mkdir()
    refused("folder.jpg", "this is a folder")
    with pytest.raises(ImageError, match=r"image: the type int is not read .*; pass a path, bytes"):
        read_image(3)  # type: ignore[arg-type]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read anything"
)
def test_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(encode(picture(), "PNG"))
    path.chmod(0)
    with pytest.raises(ImageError, match="check its permissions"):
        read_image(path)


def test_permission_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(
        ImageError, match=r"x\.png: you may not read this file; check its permissions"
    ):
        read_image("x.png")


def test_cielab_is_refused() -> None:
    with pytest.raises(
        ImageError, match=r"CIELAB .* only RGB, grey, palette and CMYK .*; export it as RGB"
    ):
        read_image(encode(Image.new("LAB", (4, 4)), "TIFF"))


TRUNCATED = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]


@pytest.mark.parametrize("form", TRUNCATED)
@pytest.mark.parametrize("part", [0.02, 0.3, 0.5, 0.9])
def test_truncated(form: str, part: float) -> None:
    data = encode(picture(120, 160), form)
    with pytest.raises(ImageError, match="cut off"):
        read_image(data[: int(part * len(data))])


@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_that_lacks_its_last_bytes(progressive: bool) -> None:
    data = encode(picture(120, 160), "JPEG", progressive=progressive)
    for cut in (1, 2, 3, 10):
        with pytest.raises(ImageError, match="cut off"):
            read_image(data[:-cut])


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=300, deadline=None)
@given(form=st.sampled_from(TRUNCATED), at=st.floats(0, 1), noise=st.binary(min_size=1, max_size=9))
def test_damaged_files_never_raise_anything_else(form: str, at: float, noise: bytes) -> None:
    data = bytearray(encode(picture(16, 16), form))
    start = int(at * len(data))
    data[start : start + len(noise)] = noise
    with contextlib.suppress(ImageError):
        read_image(bytes(data))


def bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(bytes(9999)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        (30_000, 30_000, "more than"),
        (12_000, 12_000, "12,000 x 12,000"),
        (10_001, 10_000, "10,001"),
    ],
)
def test_bomb_is_refused_before_decoding(
    width: int, height: int, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object) -> None:
        pytest.fail("the picture was decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)
    with pytest.raises(ImageError, match=f"says {size}.* limit is 100 megapixels; scale it down"):
        read_image(bomb(width, height))


# --- Preprocess -------------------------------------------------------------------------------


def reference(config: dict[str, Any], **overrides: Any) -> Any:
    """transformers' PIL processor of a configuration."""
    kind = module._kind(config).removesuffix("ImageProcessor")
    name = kind.lower()
    source = f"transformers.models.{name}.image_processing_pil_{name}"
    processor = getattr(pytest.importorskip(source), f"{kind}ImageProcessorPil")
    return processor(**{k: v for k, v in config.items() if "_type" not in k}, **overrides)


def expected_levels(config: dict[str, Any], image: Image.Image) -> np.ndarray:
    processor = reference(config)
    processor.do_rescale = processor.do_normalize = False
    (pixels,) = processor(images=[image], input_data_format="channels_last")["pixel_values"]
    return np.asarray(pixels).transpose(1, 2, 0)


@pytest.fixture(scope="module")
def photos() -> list[Path]:
    found = sorted((DATA / "photos").glob("*.JPEG"))
    if not found:
        pytest.skip(
            f"NOT COMPARED ON REAL PHOTOS: none in {DATA / 'photos'}; set MAXVISION_TEST_DATA"
        )
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers_on_photos(name: str, photos: list[Path]) -> None:
    config = CONFIGS[name]
    ours = Preprocess.from_config(config)
    for path in photos if name == "resnet" else photos[::6]:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
        np.testing.assert_array_equal(ours(path), expected_levels(config, image), str(path))


@pytest.mark.parametrize("name", CONFIGS)
def test_normalisation_equals_transformers(name: str) -> None:
    config, image = CONFIGS[name], picture(300, 280)
    ours = Preprocess.from_config(config)
    for flags in (
        {},
        {"do_rescale": False},
        {"do_normalize": False},
        {"rescale_factor": 1 / 127.5},
    ):
        ours = Preprocess.from_config({**config, **flags})
        pixels = (ours(image) - np.array(ours.mean)) / np.array(ours.std)
        want = reference({**config, **flags})(images=[image])["pixel_values"][0]
        np.testing.assert_allclose(pixels.transpose(2, 0, 1), want, rtol=1e-5, atol=1e-5)


SKIMAGE = ["astronaut", "chelsea", "coffee", "rocket", "camera", "coins", "logo"]


@pytest.mark.parametrize("name", SKIMAGE)
def test_equals_transformers_on_skimage(name: str) -> None:
    folder = Path(pytest.importorskip("skimage").__file__).parent / "data"
    path = next(folder.glob(f"{name}.*"), None)
    if path is None:
        pytest.skip(f"this scikit-image does not carry {name}")
    expected = expected_levels(RESNET, read_image(path))
    np.testing.assert_array_equal(Preprocess.from_config(RESNET)(path), expected)


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 90), width=st.integers(1, 90), name=st.sampled_from(sorted(CONFIGS)),
)  # fmt: skip
def test_odd_sizes_equal_transformers(height: int, width: int, name: str) -> None:
    image = picture(height, width, seed=height)
    np.testing.assert_array_equal(
        Preprocess.from_config(CONFIGS[name])(image), expected_levels(CONFIGS[name], image)
    )


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (3, 300_000), (300_000, 3)])
def test_long_and_thin(size: tuple[int, int]) -> None:
    """Resized whole, the last two would take 20 GB."""
    ramp = np.linspace(0, 255, max(size)).astype(np.uint8)
    ramp = np.broadcast_to(ramp if size[0] < size[1] else ramp[:, None], size)
    got = Preprocess.from_config(RESNET)(ramp)
    assert got.shape == (224, 224, 3)
    assert got.min() >= 126 and got.max() <= 128


@pytest.mark.parametrize("size", [(300, 700), (700, 300), (61, 240), (224, 900)])
def test_resizing_the_crop_alone_is_within_rounding(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    image, ours = picture(*size), Preprocess.from_config(RESNET)
    whole = ours(image).astype(int)
    monkeypatch.setattr(module, "LARGE", 0)
    assert np.abs(ours(image) - whole).max() <= 2


def test_sizes_and_statistics() -> None:
    resnet = Preprocess.from_config(RESNET)
    assert (resnet.height, resnet.width, resnet.resize) == (224, 224, 256)
    assert resnet == Preprocess() == Preprocess.from_config({**RESNET, "crop_pct": None})
    assert Preprocess.from_config(CONFIGS["cvt-384"]).resize == (384, 384)
    plain = Preprocess.from_config({**RESNET, "do_normalize": False, "do_rescale": False})
    assert (plain.mean, plain.std) == ((0, 0, 0), (1, 1, 1))
    grey = Preprocess.from_config({**RESNET, "image_mean": 0.5, "image_std": 0.5})
    assert (grey.mean, grey.std) == ((127.5,) * 3, (127.5,) * 3)


def test_result_is_writable_and_contiguous() -> None:
    got = Preprocess()(picture())
    assert got.dtype == np.uint8 and got.flags.writeable and got.flags.c_contiguous


def test_type_is_inferred_from_the_settings() -> None:
    vit = Preprocess.from_config({"size": {"height": 32, "width": 40}})
    assert (vit.resize, vit.height, vit.width) == ((32, 40), 32, 40)
    clip = Preprocess.from_config({"size": 36, "do_center_crop": True, "crop_size": 32})
    assert (clip.resize, clip.height) == (36, 32)
    assert Preprocess.from_config({"size": 32}).resize == int(32 / 0.875)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"feature_extractor_type": "DetrFeatureExtractor"},
            "image_processor_type must be one of Conv",
        ),
        ({"size": "big"}, "size must be a shortest_edge, or a height and width, .* but is 'big'"),
        ({"size": 0}, "size must be .* of 1 to 4096 px but is 0"),
        ({"size": {"longest_edge": 800}}, "size must be"),
        ({"size": {"height": 224, "width": 224}}, "size must be a shortest_edge but"),
        ({"size": 10**9}, "size must be"),
        ({"crop_pct": 0}, "crop_pct must be"),
        ({"crop_pct": "most"}, "crop_pct must be a number but is 'most'"),
        ({"resample": 9}, "resample must be one of Pillow's filters"),
        ({"resample": [3]}, "resample must be"),
        ({"do_resize": False}, "size must be a height and width, or a crop_size"),
        ({"do_center_crop": True, "crop_size": 99}, "crop_size must be the .224, 224. that size"),
        ({"do_normalize": "yes"}, "do_normalize must be true or false but is 'yes'"),
        ({"rescale_factor": 0}, "rescale_factor must be numbers above 0"),
        ({"image_std": [1, 0, 1]}, "image_std must be numbers above 0"),
        ({"image_mean": [0.5]}, "image_mean must be one number for each"),
        ({"image_mean": [0.1, 0.2, float("nan")]}, "image_mean must be a number but is nan"),
        ({"do_pad": True}, "maxvision does not know the setting do_pad, which is True; correct"),
        ({"crop_pc": 0.9}, "did you mean crop_pct"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=f"preprocessor_config.json: {match}|{match}"):
        Preprocess.from_config({**RESNET, **change})


def test_a_large_jpeg_may_be_decoded_at_a_fraction(photos: list[Path]) -> None:
    """Exactly as far as there is room for it, upright, and nearly the same."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    with Image.open(photos[0]) as file:
        photo = file.convert("RGB").resize((1200, 900), Image.Resampling.LANCZOS)
    data = encode(photo, "JPEG", quality=90, exif=exif)
    for shortest, size in (
        (451, (900, 1200)),
        (450, (450, 600)),
        (225, (225, 300)),
        (1, (113, 150)),
    ):
        assert read_image(data, shortest=shortest).size == size
    assert read_image(encode(photo, "PNG"), shortest=1).size == photo.size
    assert read_image(photo, shortest=1).size == photo.size
    for resize in (224, (200, 224)):
        exact = Preprocess(200, 224, resize)
        fast = replace(exact, fast=True)
        assert read_image(data, shortest=fast.shortest).size == (450, 600)
        apart = np.abs(exact(data).astype(int) - fast(data))
        assert 0 < apart.mean() < 1 and apart.max() < 40
        small = photo.resize((2 * 224, 3 * 224))
        same = encode(small, "JPEG")
        np.testing.assert_array_equal(exact(same), fast(same))
    assert Preprocess(resize=None, fast=True).shortest is None


def test_settings_of_no_matter() -> None:
    extra = {
        "do_pad": False,
        "processor_class": "X",
        "data_format": "channels_first",
        "pad_size": None,
    }
    assert Preprocess.from_config({**RESNET, **extra}) == Preprocess()


# --- load_batch -------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [None, 1, 4])
def test_batch_keeps_order_and_contains_failures(workers: int | None) -> None:
    images = [picture(seed=i) for i in range(9)]
    sources: list[module.Source] = [encode(image, "PNG") for image in images]
    sources[4] = b"no picture"
    got = load_batch(sources, Preprocess(), workers)
    for i, (result, image) in enumerate(zip(got, images, strict=True)):
        if i == 4:
            assert isinstance(result, ImageError)
        else:
            np.testing.assert_array_equal(result, Preprocess()(image))


def test_empty_batch() -> None:
    assert load_batch([], Preprocess()) == []
