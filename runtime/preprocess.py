"""An image file becomes the array a model reads: decode, make upright RGB, resize, crop.

Normalisation is not done here. The graph does it, with ``Preprocess.mean`` and ``Preprocess.std``,
so what travels to the device is one byte a channel.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from difflib import get_close_matches
from typing import IO, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError
from PIL import WebPImagePlugin as _  # noqa: F401  registers WebP: Pillow imports it only on demand

from maxvision.common import pictures
from maxvision.common.errors import ImageError, ModelError, TooLargeError
from maxvision.common.host import cores
from maxvision.common.pictures import FORMATS, MAX_PIXELS
from maxvision.runtime import tiff

Pixels: TypeAlias = npt.NDArray[np.uint8]
Source: TypeAlias = "str | os.PathLike[str] | bytes | IO[bytes] | Image.Image | npt.NDArray[Any]"

T = TypeVar("T")

_PILLOW = tuple(each.name.upper() for each in FORMATS)
_NOT_READ = f"and not a {pictures.names('or')} picture"

_BLOCK = 2**20  # numbers that are scaled at a time

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes a picture of an EXIF orientation upright."""


# --- a source becomes an upright RGB image ----------------------------------------------------


def read_image(source: Source, name: str | None = None, shortest: int | None = None) -> Image.Image:
    """Reads one picture as an upright 8-bit RGB image.

    Of an animation or a multi-page file the first picture is read. EXIF orientation is applied.
    Transparency is laid over white, which is how a viewer shows it (transformers drops alpha and
    shows whatever colour was left underneath). 16-bit grey is scaled to 8, not clipped. Numbers
    of no fixed range (32-bit integers, floats) are read with white at the smallest of 1 (floats
    only), 255 and 65535 that holds them all; failing that, their range is stretched to 0..255.

    Args:
        source: A path, the bytes of a file, an open binary file, a PIL image, or an array
            ``[H, W]``, ``[H, W, 1]``, ``[H, W, 3]`` (RGB) or ``[H, W, 4]`` (RGBA) of booleans,
            integers or floats.
        name: What errors call the picture; its path when not given.
        shortest: If given, a JPEG is decoded at a half, a quarter or an eighth of its size, the
            least at which its shorter edge has as many pixels.

    Raises:
        ImageError: If the picture is missing, unreadable, damaged, larger than ``MAX_PIXELS``
            or of another format than ``common.pictures.FORMATS``.
    """
    if isinstance(source, (str, os.PathLike)):
        where = name or os.fspath(source)
        with closing(_open(source, where)) as file:
            return _decode(file, where, shortest)
    where = name or "image"
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _decode(io.BytesIO(source), where, shortest)
    if isinstance(source, np.ndarray):
        return _to_rgb(_from_array(source, where))
    if isinstance(source, Image.Image):
        return _load(source, where, shortest)
    if hasattr(source, "read"):
        return _decode(source, where, shortest)
    raise ImageError(
        f"{where}: the type {type(source).__name__} is not read as a picture; pass a path, bytes, a"
        " binary file, a PIL image or a NumPy array"
    )


def _open(path: str | os.PathLike[str], where: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        problem = "there is no such file; check the path"
        if re.match(r"https?://", where):
            problem = "URLs are not fetched; pipe the picture in: curl -s URL | maxvision -"
        elif not where:
            problem = "an empty name is no file; check the variable that it comes from"
    except IsADirectoryError:
        problem = "this is a folder; name the pictures in it"
    except PermissionError:
        problem = "you may not read this file; check its permissions"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        problem = f"the file cannot be opened ({reason}); check the path"
    raise ImageError(f"{where}: {problem}")


def _decode(file: IO[bytes], where: str, shortest: int | None) -> Image.Image:
    with open_image(file, where) as image:
        return _load(image, where, shortest)


def open_image(
    file: IO[bytes], where: str = "image", max_pixels: int = MAX_PIXELS
) -> ImageFile.ImageFile:
    """Opens a picture, and checks its header; nothing is decoded yet.

    Args:
        file: An open binary file.
        where: What errors call it.
        max_pixels: Of the largest picture that is taken, and of a TIFF's largest tile.

    Raises:
        TooLargeError: If its header says that it is larger.
        ImageError: If it is of another format than ``common.pictures.FORMATS``, or damaged.
    """
    tile = 0
    try:
        if not file.seekable():  # a pipe
            file = io.BytesIO(file.read())
        if tiff.is_tiff(file.read(4)):
            tile = tiff.tile_pixels(file)
        file.seek(0)
        image = Image.open(file, formats=_PILLOW)
    except UnidentifiedImageError:
        file.seek(0)
        raise ImageError(f"{where}: {_describe(file.read(64))}") from None
    except Image.DecompressionBombError:  # Pillow's own limit, above ours
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise _too_large(where, f"more than {most:,} pixels", max_pixels) from None
    except Exception as error:
        raise _damaged(where, error) from error
    if image.width * image.height > max_pixels:
        image.close()
        raise _too_large(where, f"{image.width:,} x {image.height:,}", max_pixels)
    if tile > max_pixels:
        image.close()
        raise _too_large(where, f"tiles of {tile:,} pixels", max_pixels)
    return image


def _load(image: Image.Image, where: str, shortest: int | None = None) -> Image.Image:
    if image.width * image.height > MAX_PIXELS:
        raise _too_large(where, f"{image.width:,} x {image.height:,}", MAX_PIXELS)
    if not image.width * image.height:
        raise ImageError(f"{where}: the picture has no pixels; check its source")
    if image.mode == "LAB":
        raise ImageError(
            f"{where}: the picture has CIELAB colours, and only RGB, grey, palette and CMYK are"
            " read; export it as RGB"
        )
    try:
        if shortest is not None and isinstance(image, ImageFile.ImageFile):
            image.draft(None, (shortest, shortest))  # which only a JPEG heeds
        image.load()
        turn = UPRIGHT.get(_orientation(image))
        image = _to_rgb(image)
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged data
        raise _damaged(where, error) from error
    if turn is not None:
        image = image.transpose(turn)
        image.info = {}  # or a second reading would turn it again
    return image


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation; EXIF that cannot be read says nothing (1)."""
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
        top = None
        if image.mode.startswith("I;16"):
            top = 2 ** tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0] - 1  # TIFF has 12-bit too
        grey = _to_8_bit(np.asarray(image), top)
        if tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0:  # WhiteIsZero
            grey = np.subtract(255, grey)
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        over = Image.new("RGBA", image.size, "white")
        over.alpha_composite(image.convert("RGBA"))
        image = over
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_array(array: npt.NDArray[Any], where: str) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or not array.size:
        raise ImageError(
            f"{where}: an array of shape {list(array.shape)} is not a picture; pass one picture,"
            " channels last: [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]"
        )
    if array.dtype.kind not in "biuf":
        raise ImageError(
            f"{where}: an array must hold booleans, integers or floats but this one's dtype is"
            f" {array.dtype}; convert it to uint8"
        )
    top = {"bool": 1, "uint8": 255, "uint16": 65535}.get(array.dtype.name)
    return Image.fromarray(np.ascontiguousarray(_to_8_bit(array, top)))


def _to_8_bit(values: npt.NDArray[Any], top: int | None = None) -> Pixels:
    """Scales numbers so that 0 is level 0 and ``top`` is level 255 (`read_image` has the rule)."""
    if top == 255:
        return values.astype(np.uint8, copy=False)
    low, high = (0.0, float(top)) if top is not None else _range(values)
    levels = np.empty(values.shape, np.uint8)
    for rows in _rows(values):
        scaled = values[rows].astype(np.float32)
        if top is None:
            scaled = np.nan_to_num(scaled, nan=low, posinf=high, neginf=low)
        scaled -= low
        scaled *= 255 / ((high - low) or 1)
        scaled += 0.5
        levels[rows] = scaled.clip(0, 255)
    return levels


def _range(values: npt.NDArray[Any]) -> tuple[float, float]:
    """Finds which numbers are black and white where the dtype does not say."""
    low, high = math.inf, -math.inf
    for rows in _rows(values):
        part = values[rows].astype(np.float32)
        finite = part[np.isfinite(part)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if low > high:
        raise ValueError("no finite value in the picture")
    for white in (1, 255, 65535) if values.dtype.kind == "f" else (255, 65535):
        if low >= 0 and high <= white:
            return 0.0, white
    return low, high


def _rows(values: npt.NDArray[Any]) -> Iterator[slice]:
    """Cuts an array into blocks of rows: float32 copies of all of it would be 400 MB each."""
    step = max(1, _BLOCK // max(1, values[:1].size))
    return (slice(at, at + step) for at in range(0, len(values), step))


_SIGNATURES = (  # where in the file, what stands there, what is wrong
    (0, b"\xff\xd8\xff", "the JPEG header is cut off or damaged; copy the file again"),
    (0, b"\x89PNG", "the PNG header is cut off or damaged; copy the file again"),
    (8, b"WEBP", "the WebP file is cut off or damaged; copy the file again"),
    (0, b"GIF8", "the GIF header is cut off or damaged; copy the file again"),
    (0, b"BM", "the BMP header is cut off or damaged; copy the file again"),
    (0, b"II*\0", "the TIFF file is cut off or damaged; copy the file again"),
    (0, b"MM\0*", "the TIFF file is cut off or damaged; copy the file again"),
    (4, b"ftyp", f"this is HEIC, AVIF or a video {_NOT_READ}; convert it to JPEG"),
    (0, b"%PDF", f"this is a PDF {_NOT_READ}; export its pictures as JPEG or PNG"),
)


def _describe(head: bytes) -> str:
    """Tells from its first bytes what a file is that Pillow could not open, and what to do."""
    if not head:
        return "the file is empty; copy it again"
    for start, magic, what in _SIGNATURES:
        if head[start:].startswith(magic):
            return what
    if all(byte in b"\t\n\r\f" or (byte >= 32 and byte != 127) for byte in head):
        return f"this is text {_NOT_READ}; check that it is the file you mean"
    return f"this is not a picture that can be read; convert it to {pictures.names('or')}"


def _too_large(where: str, size: str, limit: int) -> ImageError:
    most = f"{limit:,} pixels" if limit % 1_000_000 else f"{limit // 1_000_000} megapixels"
    return TooLargeError(
        f"{where}: the picture is too large: its header says {size}, and the limit is {most};"
        " scale it down first"
    )


def _damaged(where: str, error: Exception) -> ImageError:
    return ImageError(
        f"{where}: the picture is cut off or damaged"
        f" ({str(error).rstrip('.') or type(error).__name__}); copy or export it again"
    )


# --- an upright RGB image becomes the input of a model ----------------------------------------

SPARE = 2
"""How many times as large as it has to be a JPEG is decoded at least, if ``Preprocess.fast``."""

LARGE = 2**24
"""Pixels; a picture resized beyond this is long and thin, and only its crop is resized."""

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HALF = [0.5, 0.5, 0.5]
_CLIP = {
    "size": {"shortest_edge": 224},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": 224,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_PROCESSORS: dict[str, dict[str, Any]] = {  # transformers' classes and their defaults (5.12)
    "ConvNextImageProcessor": {
        "size": {"shortest_edge": 384}, "resample": 3, "crop_pct": 224 / 256,
        "image_mean": _HALF, "image_std": _HALF,
    },
    "ViTImageProcessor": {"size": 224, "resample": 2, "image_mean": _HALF, "image_std": _HALF},
    "DeiTImageProcessor": {
        "size": 256, "resample": 3, "do_center_crop": True, "crop_size": 224,
        "image_mean": _HALF, "image_std": _HALF,
    },
    "CLIPImageProcessor": _CLIP,
    "BitImageProcessor": _CLIP,
}  # fmt: skip
_COMMON = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
_READ = set(_COMMON) | set(
    "size resample crop_pct do_center_crop crop_size image_mean image_std default_to_square"
    " image_processor_type feature_extractor_type".split()
)
_NO_MATTER = set(
    "processor_class _processor_class _valid_processor_keys do_convert_rgb num_channels data_format"
    " input_data_format return_tensors device auto_map disable_grouping".split()
)


@dataclass(frozen=True)
class Preprocess:
    """Resizes, then crops the centre: the evaluation transform of a checkpoint.

    The defaults are those of ImageNet evaluation: 256 px, bicubic, the central 224.

    Attributes:
        height: Height of the result, px. An image smaller than the crop gets a black border.
        width: Width of the result, px.
        resize: What the image is resized to before the crop: the length of its shorter edge in
            px, ``(height, width)`` whatever its shape, or None for its own size.
        resample: Pillow's filter.
        mean: Per RGB channel, in levels of the 0..255 result: the model's input is
            ``(result - mean) / std``.
        std: As ``mean``; ``mean`` 0 and ``std`` 1 leave the levels as they are.
        fast: Whether a large JPEG may be decoded at a fraction of its size, by libjpeg-turbo's
            scaled inverse transforms, which average where ``resample`` would filter. It stays at
            least ``SPARE`` times as large as ``resize``; docs/serving.md has what that changes.
    """

    height: int = 224
    width: int = 224
    resize: int | tuple[int, int] | None = 256
    resample: Image.Resampling = Image.Resampling.BICUBIC
    mean: tuple[float, ...] = tuple(m / (1 / 255) for m in _IMAGENET_MEAN)
    std: tuple[float, ...] = tuple(s / (1 / 255) for s in _IMAGENET_STD)
    fast: bool = False

    @property
    def shortest(self) -> int | None:
        """What ``read_image`` takes: the shorter edge that is enough, px; None for the whole."""
        if not self.fast or self.resize is None:
            return None
        edges = self.resize if isinstance(self.resize, tuple) else (self.resize,)
        return SPARE * max(edges)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Preprocess:
        """Reads a ``preprocessor_config.json`` as transformers 5.12 does.

        The processors of ConvNext (that of Microsoft's ResNet and CvT checkpoints), ViT, DeiT,
        CLIP and BiT are known, under their older names too. A file that names none is read as
        ConvNext unless its settings say otherwise.

        Raises:
            ModelError: If a setting is unknown, malformed or not supported.
        """
        kind = _kind(config)
        for key in sorted(config.keys() - _READ - _NO_MATTER):
            if config[key] not in (None, False):
                near = get_close_matches(key, _READ, 1)
                hint = f"did you mean {near[0]}?" if near else "correct the file"
                raise ModelError(
                    f"preprocessor_config.json: maxvision does not know the setting {key}, which is"
                    f" {config[key]!r}; {hint}"
                )
        given = {key: value for key, value in config.items() if value is not None}
        setting = {**_COMMON, **_PROCESSORS[kind], **given}

        resize, (height, width) = _geometry(kind, setting)
        resample = setting["resample"]
        if isinstance(resample, bool) or resample not in range(6):
            raise _bad("resample", "one of Pillow's filters, 0 to 5,", resample)
        scale = _number(setting, "rescale_factor") if _on(setting, "do_rescale") else 1.0
        mean: tuple[float, ...] = (0.0,) * 3
        std: tuple[float, ...] = (1.0,) * 3
        if _on(setting, "do_normalize"):
            mean, std = _channels(setting, "image_mean"), _channels(setting, "image_std")
        if scale <= 0 or min(std) <= 0:
            key = "rescale_factor" if scale <= 0 else "image_std"
            raise _bad(key, "numbers above 0", setting[key])
        return cls(
            height,
            width,
            resize,
            Image.Resampling(resample),
            tuple(m / scale for m in mean),
            tuple(s / scale for s in std),
        )

    def __call__(self, source: Source) -> Pixels:
        """Turns a picture (whatever `read_image` reads) into levels ``[height, width, RGB]``.

        Raises:
            ImageError: If the picture cannot be read.
        """
        image = self._resized(read_image(source, shortest=self.shortest))
        left, top = (image.width - self.width) // 2, (image.height - self.height) // 2
        if image.size != (self.width, self.height):
            image = image.crop((left, top, left + self.width, top + self.height))
        return np.array(image)

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Tells to what height and width a picture is resized."""
        if self.resize is None:
            return height, width
        if isinstance(self.resize, tuple):
            return self.resize
        length = int(self.resize * max(height, width) / min(height, width))
        return (length, self.resize) if width <= height else (self.resize, length)

    def _resized(self, image: Image.Image) -> Image.Image:
        if self.resize is None:
            return image
        height, width = self.scaled(image.height, image.width)
        if width * height <= LARGE:
            return image.resize((width, height), self.resample)
        # Equal to resize and crop but for rounding, which Pillow's choice of the first axis moves.
        w, h = min(width, self.width), min(height, self.height)
        left, top = (width - w) // 2, (height - h) // 2
        x, y = image.width / width, image.height / height
        box = (left * x, top * y, (left + w) * x, (top + h) * y)
        return image.resize((w, h), self.resample, box=box)


def load_batch(
    sources: Sequence[Source], read: Callable[[Source], T], workers: int | None = None
) -> list[T | ImageError]:
    """Reads pictures on ``workers`` threads (unset: one a core), in order.

    A picture that cannot be read has its error in its place. Pillow releases the interpreter
    while it decodes and resizes.
    """

    def load(source: Source) -> T | ImageError:
        try:
            return read(source)
        except ImageError as error:
            return error

    workers = min(workers or cores(), len(sources))
    if workers <= 1:
        return [load(source) for source in sources]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(load, sources))


def _kind(config: dict[str, Any]) -> str:
    name = config.get("image_processor_type") or config.get("feature_extractor_type")
    if name:
        kind = str(name).replace("FeatureExtractor", "ImageProcessor")
        kind = kind.removesuffix("Fast").removesuffix("Pil")
        if kind not in _PROCESSORS:
            raise _bad("image_processor_type", f"one of {', '.join(_PROCESSORS)}", name)
        return kind
    size = config.get("size")
    if config.get("crop_pct") is None:
        if config.get("do_center_crop") or config.get("crop_size"):
            return "CLIPImageProcessor"
        if isinstance(size, dict) and "height" in size:
            return "ViTImageProcessor"
    return "ConvNextImageProcessor"


def _geometry(
    kind: str, setting: dict[str, Any]
) -> tuple[int | tuple[int, int] | None, tuple[int, int]]:
    """Returns ``Preprocess.resize`` and the height and width of the crop."""
    resize: int | tuple[int, int] | None = None
    crop: int | tuple[int, int] | None = None
    if _on(setting, "do_resize"):
        square = kind in ("ViTImageProcessor", "DeiTImageProcessor")
        resize = crop = _size("size", setting["size"], setting.get("default_to_square", square))
    if kind == "ConvNextImageProcessor" and resize is not None:
        if not isinstance(resize, int):
            raise _bad("size", "a shortest_edge", setting["size"])
        part = _number(setting, "crop_pct")
        if not 0 < part <= 1:
            raise _bad("crop_pct", "a number above 0 and up to 1", part)
        crop = (resize, resize)
        resize = int(resize / part) if resize < 384 else crop
    if _on(setting, "do_center_crop"):
        inner = _size("crop_size", setting.get("crop_size"), True)
        if kind == "ConvNextImageProcessor" and crop not in (None, inner):
            raise _bad("crop_size", f"the {crop} that size gives", inner)
        crop = inner
    if not isinstance(crop, tuple):
        raise _bad("size", "a height and width, or a crop_size too,", setting["size"])
    return resize, crop


def _size(key: str, value: Any, square: bool) -> int | tuple[int, int]:
    """Reads a size: an int is the shorter edge, or both edges if ``square``; a pair is exact."""
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if v is not None}
        if value.keys() == {"shortest_edge"}:
            value, square = value["shortest_edge"], False
        elif value.keys() == {"height", "width"}:
            value = [value["height"], value["width"]]
    edges = value if isinstance(value, (list, tuple)) and len(value) == 2 else [value]
    if not all(type(edge) is int and 1 <= edge <= 4096 for edge in edges):
        raise _bad(key, "a shortest_edge, or a height and width, of 1 to 4096 px", value)
    if len(edges) == 1 and not square:
        return int(edges[0])
    return int(edges[0]), int(edges[-1])


def _on(setting: dict[str, Any], key: str) -> bool:
    value = setting.get(key, False)
    if not isinstance(value, bool):
        raise _bad(key, "true or false", value)
    return value


def _number(setting: dict[str, Any], key: str) -> float:
    value = setting.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        raise _bad(key, "a number", value)
    return float(value)


def _channels(setting: dict[str, Any], key: str) -> tuple[float, ...]:
    value = setting[key]
    values = value if isinstance(value, (list, tuple)) else [value] * 3
    if len(values) != 3:
        raise _bad(key, "one number for each of R, G and B", value)
    return tuple(_number({key: each}, key) for each in values)


def _bad(key: str, takes: str, value: Any) -> ModelError:
    return ModelError(
        f"preprocessor_config.json: {key} must be {takes} but is {value!r}; correct the file"
    )
