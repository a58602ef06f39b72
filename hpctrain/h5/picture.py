"""The pixels of one picture file, or of its bytes.

Pillow decodes, and decides what is a picture. Plain JPEG bytes are decoded by imagecodecs, which gives the same pixels
from the same library (libjpeg-turbo) with less around it: 6 times the speed for 32 x 32 pixels, 1.6 for 256 x 256.
PNG stays with Pillow: palettes, transparency and 16 bits are many cases, for a factor of 1.2 at 256 x 256.
"""

from __future__ import annotations

import io
import math
import struct
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from imagecodecs import Jpeg8Error, jpeg8_decode
from PIL import Image, ImageOps, UnidentifiedImageError

from hpctrain.errors import DataError, StorageError, UsageError

ENCODED_FORMATS: Final = ("JPEG", "PNG")
"""Pictures that may be kept encoded, as bytes in a ragged field."""
# Named, because some of Pillow's other readers start programs (EPS).
_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_MAX_PIXELS: Final = 89_478_485  # Pillow's own limit: 256 MiB of RGB
# What Pillow's readers raise for damaged files.
_DECODE_ERRORS: Final = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
)
_PNG_START: Final = b"\x89PNG\r\n\x1a\n"
# Markers of a JPEG stream (ITU-T T.81, table B.1).
_JPEG_START: Final = b"\xff\xd8\xff"
_JPEG_END: Final = b"\xff\xd9"
_JPEG_FRAMES: Final = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive Huffman
_JPEG_PLAIN: Final = (*range(0xE2, 0xEE), 0xE0, 0xDB, 0xC4, 0xDD, 0xFE)  # no EXIF (E1), no Adobe (EE)


def check_size(size: int) -> None:
    """Raise `UsageError` for a side, in pixels, that pictures cannot be scaled to."""
    if size < 1:
        raise UsageError(f"size is {size}, but must be at least 1 pixel")
    if size * size > _MAX_PIXELS:
        raise UsageError(
            f"size is {size}, which makes {size * size} pixels, but the bound is {_MAX_PIXELS}; "
            f"give at most {math.isqrt(_MAX_PIXELS)}"
        )


def load_image(path: Path, size: int | None, gray: bool) -> npt.NDArray[np.uint8]:
    """Decode one picture file to uint8 (H, W, 3), or (H, W) with `gray`; scaled to `size` x `size` pixels if given.

    Raises `DataError` naming the file for what does not decode, has more than 8 bits per channel or too many
    pixels, `StorageError` when the file cannot be read.
    """
    sides = None if size is None else (size, size)
    return _decode(path, str(path), sides, "L" if gray else "RGB", _FORMATS)


def decode_image(data: bytes, name: str, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """Decode the bytes of a JPEG or PNG file to uint8 (H, W, 3), scaled to `size` (height, width) if given.

    `name` is what messages call it; errors as for `load_image`.
    """
    if not _is_plain_jpeg(data, name):
        return _decode(io.BytesIO(data), name, size, "RGB", ENCODED_FORMATS)
    try:
        pixels: npt.NDArray[np.uint8] = jpeg8_decode(data)
    except (Jpeg8Error, ValueError) as error:
        raise DataError(f"{name}: does not decode as an image ({error}); repair or remove it") from error
    return pixels if size is None else np.asarray(_scaled(Image.fromarray(pixels), size))


def read_encoded(path: Path, size: int | None) -> bytes:
    """The bytes of a JPEG or PNG file, decoded once to see that it can be, and has `size` x `size` pixels if given.

    Errors as for `load_image`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        _refuse_unreadable(str(path), error)
        raise DataError(f"{path}: does not decode as an image ({error}); repair or remove it") from error
    if data and not data.startswith((_JPEG_START, _PNG_START)):
        raise DataError(
            f"{path}: is neither JPEG nor PNG, which are the pictures that can be kept encoded; convert or remove it, "
            "or leave out --keep-encoded"
        )
    height, width = decode_image(data, str(path)).shape[:2]
    if size is not None and (height, width) != (size, size):
        raise DataError(
            f"{path}: {width} x {height} pixels, but --size {size} was given, and pictures kept encoded are not "
            "scaled; scale the files, or leave out --size or --keep-encoded"
        )
    return data


def _decode(
    file: Path | io.BytesIO, name: str, size: tuple[int, int] | None, mode: str, formats: tuple[str, ...]
) -> npt.NDArray[np.uint8]:
    try:
        with Image.open(file, formats=formats) as image:
            _check_image(name, image)
            upright = ImageOps.exif_transpose(image)
            flat = _without_alpha(upright).convert(mode)
            return np.asarray(flat if size is None else _scaled(flat, size))
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{name}: {error}; scale the image down, or remove it") from error
    except _DECODE_ERRORS as error:
        _refuse_unreadable(name, error)
        unknown = isinstance(error, UnidentifiedImageError)  # whose text names an object in memory
        cause = f"none of {', '.join(formats)}" if unknown else error
        raise DataError(f"{name}: does not decode as an image ({cause}); repair or remove it") from error


def _scaled(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Bicubic, antialiased; `size` is (height, width)."""
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC)


def _refuse_unreadable(name: str, error: Exception) -> None:
    """Raise `StorageError` for an error of the filesystem, but not for a file that is absent."""
    absent = isinstance(error, (FileNotFoundError, IsADirectoryError))
    if isinstance(error, OSError) and error.errno and not absent:
        raise StorageError(f"{name}: cannot be read: {error.strerror}; check the filesystem") from error


def _is_plain_jpeg(data: bytes, name: str) -> bool:
    """Whether the bytes are a whole JPEG of three 8-bit channels without EXIF (orientation) and Adobe (other colours).

    Raises `DataError` for too many pixels.
    """
    if not (
        data.startswith(_JPEG_START) and data.endswith(_JPEG_END)
    ):  # the decoder would fill up what is cut off
        return False
    position = 2
    while position + 10 <= len(data) and data[position] == 0xFF:
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
        if marker in _JPEG_FRAMES:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, position + 4)
            _check_pixels(name, width * height)
            return bool(bits == 8 and channels == 3 and width and height)
        if marker not in _JPEG_PLAIN:
            return False
        position += 2 + length
    return False


def _check_pixels(name: str, pixels: int) -> None:
    if pixels > _MAX_PIXELS:
        raise DataError(
            f"{name}: {pixels} pixels, but the bound is {_MAX_PIXELS}; scale the image down, or remove it"
        )


def _check_image(name: str, image: Image.Image) -> None:
    _check_pixels(name, image.width * image.height)
    if image.mode.startswith(("I", "F")):
        raise DataError(
            f"{name}: has pixels of more than 8 bits (mode {image.mode}); convert it to 8 bits, or pack it as .npy"
        )


def _without_alpha(image: Image.Image) -> Image.Image:
    """The picture on white, where it has transparent parts: what lies beneath them is arbitrary, often black."""
    if not image.has_transparency_data:
        return image
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer)
