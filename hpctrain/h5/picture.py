"""The pixels of one picture file, or of its bytes.

Pillow decodes, and decides what is a picture. Plain JPEG bytes are decoded by imagecodecs, which gives the same pixels
from the same library (libjpeg-turbo) with less around it: 6 times the speed for 32 x 32 pixels, 1.6 for 256 x 256.
PNG stays with Pillow: palettes, transparency and 16 bits are many cases, for a factor of 1.2 at 256 x 256.

How many pixels a picture has is read from its header, and refused beyond the bound before any of them is decoded.
"""

from __future__ import annotations

import io
import math
import os
import stat
import struct
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from imagecodecs import Jpeg8Error, jpeg8_decode
from PIL import Image, ImageOps, UnidentifiedImageError

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.archive_limits import check_member_bytes

MAX_PIXELS: Final = 89_478_485
"""Pixels of a picture that is decoded, unless another bound is given; Pillow's own limit: 256 MiB of RGB."""
ENCODED_FORMATS: Final = ("JPEG", "PNG")
"""Pictures that may be kept encoded, as bytes in a ragged field."""
# Named, because some of Pillow's other readers start programs (EPS).
FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pictures that can be decoded."""
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
    if size * size > MAX_PIXELS:
        raise UsageError(
            f"size is {size}, which makes {size * size} pixels, but the bound is {MAX_PIXELS}; "
            f"give at most {math.isqrt(MAX_PIXELS)}"
        )


def load_image(
    path: Path, size: int | None, gray: bool, max_pixels: int = MAX_PIXELS
) -> npt.NDArray[np.uint8]:
    """Decode one picture file to uint8 (H, W, 3), or (H, W) with `gray`; scaled to `size` x `size` pixels if given.

    Raises `DataError` naming the file for what does not decode, has more than 8 bits per channel or too many
    pixels, `StorageError` when the file cannot be read.
    """
    sides = None if size is None else (size, size)
    return decode_image(read_picture(path), str(path), sides, gray, FORMATS, max_pixels)


def read_picture(path: Path) -> bytes:
    """The bytes of a picture file.

    Raises `DataError` for one that is not there, is no file, or is too large to be one; `StorageError` when it cannot
    be read.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DataError(f"{path}: is no regular file; remove it")
            check_member_bytes(str(path), found.st_size)
            return file.read()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DataError(f"{path}: does not decode as an image ({error}); repair or remove it") from error
    except DataError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}; check the filesystem") from error


def decode_image(
    data: bytes,
    name: str,
    size: tuple[int, int] | None = None,
    gray: bool = False,
    formats: tuple[str, ...] = ENCODED_FORMATS,
    max_pixels: int = MAX_PIXELS,
) -> npt.NDArray[np.uint8]:
    """Decode the bytes of a picture file to uint8 (H, W, 3), or (H, W) with `gray`, scaled to `size` (height, width).

    `name` is what messages call it; `formats` are those that it may have. Raises `DataError` as `load_image` does.
    """
    if not _is_plain_jpeg(data, name, max_pixels):
        return _decode(data, name, size, "L" if gray else "RGB", formats, max_pixels)
    try:
        pixels: npt.NDArray[np.uint8] = jpeg8_decode(data)
    except (Jpeg8Error, ValueError) as error:
        raise DataError(f"{name}: does not decode as an image ({error}); repair or remove it") from error
    return np.asarray(_finished(Image.fromarray(pixels), "L" if gray else "RGB", size))


def check_encoded(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Decode the bytes of a JPEG or PNG file to see that they can be; returns height and width in pixels.

    Raises `DataError` for other formats, and as for `decode_image`.
    """
    if data and not data.startswith((_JPEG_START, _PNG_START)):
        raise DataError(
            f"{name}: is neither JPEG nor PNG, which are the pictures that can be kept encoded; convert or remove it, "
            "or leave out --keep-encoded"
        )
    height, width = decode_image(data, name, max_pixels=max_pixels).shape[:2]
    return height, width


def allow_pixels(max_pixels: int) -> None:
    """Let Pillow read pictures of so many pixels, in the whole process; it refuses some that are within a larger bound.

    The bound of each picture is checked here all the same.
    """
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels


def _open_at_once(path: str, flags: int) -> int:
    """A pipe in the place of a picture is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _decode(
    data: bytes,
    name: str,
    size: tuple[int, int] | None,
    mode: str,
    formats: tuple[str, ...],
    max_pixels: int,
) -> npt.NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            _check_image(name, image, max_pixels)
            upright = ImageOps.exif_transpose(image)
            return np.asarray(_finished(_without_alpha(upright), mode, size))
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{name}: {error}; scale the image down, or remove it") from error
    except _DECODE_ERRORS as error:
        unknown = isinstance(error, UnidentifiedImageError)  # whose text names an object in memory
        cause = f"none of {', '.join(formats)}" if unknown else error
        raise DataError(f"{name}: does not decode as an image ({cause}); repair or remove it") from error


def _finished(image: Image.Image, mode: str, size: tuple[int, int] | None) -> Image.Image:
    """In this mode, and scaled: bicubic, antialiased; `size` is (height, width)."""
    converted = image.convert(mode)
    return converted if size is None else converted.resize((size[1], size[0]), Image.Resampling.BICUBIC)


def _is_plain_jpeg(data: bytes, name: str, max_pixels: int) -> bool:
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
            _check_pixels(name, width * height, max_pixels)
            return bool(bits == 8 and channels == 3 and width and height)
        if marker not in _JPEG_PLAIN:
            return False
        position += 2 + length
    return False


def _check_pixels(name: str, pixels: int, max_pixels: int) -> None:
    if pixels > max_pixels:
        raise DataError(
            f"{name}: {pixels} pixels, but the bound is {max_pixels}; scale the image down, or remove it"
        )


def _check_image(name: str, image: Image.Image, max_pixels: int) -> None:
    _check_pixels(name, image.width * image.height, max_pixels)
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
