"""Pictures as a source: decoded with Pillow while packing, a few at a time."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.packed import Field
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import ArraySource, Columns

IMAGE_SUFFIXES: Final = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
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


class ImageSource:
    """Pictures (field `image`, uint8 of (H, W, 3), or (H, W) with `gray`) and further columns of equal
    length.

    With `size`, pictures are scaled to `size` x `size` pixels (bicubic, antialiased); without, all must have
    the size of the first. Transparent parts become white; of an animation the first frame is taken; the
    camera's orientation is applied. Raises `DataError` for a picture that does not decode.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        size: int | None = None,
        gray: bool = False,
        columns: Mapping[str, npt.NDArray[Any] | Ragged] | None = None,
        classes: Sequence[str] | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._paths, self._size, self._gray = list(paths), size, gray
        self._columns = ArraySource(columns or {}, classes)
        self.classes = self._columns.classes
        self.warnings = warnings
        self.num_samples = len(self._paths)
        shape = load_image(self._paths[0], size, gray).shape if self._paths else ()
        self.fields = {"image": Field("image", "dense", np.dtype(np.uint8), shape), **self._columns.fields}

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop), decoded."""
        shape = self.fields["image"].sample_shape
        images = np.empty((stop - start, *shape), np.uint8)
        for row, path in enumerate(self._paths[start:stop]):
            image = load_image(path, self._size, self._gray)
            if image.shape != shape:
                raise DataError(
                    f"{path}: {image.shape[1]} x {image.shape[0]} pixels, but {self._paths[0]} has "
                    f"{shape[1]} x {shape[0]}; give --size N to scale all to N x N"
                )
            images[row] = image
        return {"image": images, **self._columns.read(start, stop)}

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples."""
        return self._columns.num_values(name)


def open_image_folder(root: Path, size: int | None = None, gray: bool = False) -> ImageSource:
    """A folder with one sub-folder of pictures per class; `label` (int64) numbers the classes in sorted
    order.

    Raises `DataError` when there are no classes, or a class has no pictures.
    """
    folders = sorted(item for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))
    if not folders:
        found = len(list(root.iterdir()))
        raise DataError(
            f"{root} has no class sub-folders ({found} other entries); put the images of each class into a sub-folder "
            "of its own, or add a table (.csv) with the columns file and label or text"
        )
    paths: list[Path] = []
    labels: list[int] = []
    others: list[Path] = []
    for label, folder in enumerate(folders):
        files = _files_below(folder)
        images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
        if not images:
            raise DataError(
                f"{folder}: the class has no images ({', '.join(sorted(IMAGE_SUFFIXES))}); "
                "add some or remove the folder"
            )
        paths += images
        labels += [label] * len(images)
        others += [path for path in files if path.suffix.lower() not in IMAGE_SUFFIXES]
    left_out = (
        (f"{len(others)} files that are no images are left out (first: {others[0]})",) if others else ()
    )
    columns = {"label": np.array(labels, np.int64)}
    return ImageSource(paths, size, gray, columns, [folder.name for folder in folders], left_out)


def _files_below(folder: Path) -> list[Path]:
    """All files below a folder, hidden ones aside, sorted by their relative name."""
    files = [
        Path(at) / name for at, _, names in os.walk(folder) for name in names if not name.startswith(".")
    ]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


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
    """Decode one picture to uint8 (H, W, 3), or (H, W) with `gray`.

    Raises `DataError` naming the file for what does not decode, has more than 8 bits per channel or too many
    pixels, `StorageError` when the file cannot be read.
    """
    try:
        with Image.open(path, formats=_FORMATS) as image:
            _check_image(path, image)
            upright = ImageOps.exif_transpose(image)
            flat = _without_alpha(upright).convert("L" if gray else "RGB")
            if size is not None:
                flat = flat.resize((size, size), Image.Resampling.BICUBIC)
            return np.asarray(flat)
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: {error}; scale the image down, or remove it") from error
    except _DECODE_ERRORS as error:
        absent = isinstance(error, (FileNotFoundError, IsADirectoryError))
        if isinstance(error, OSError) and error.errno and not absent:
            raise StorageError(f"{path}: cannot be read: {error.strerror}; check the filesystem") from error
        raise DataError(f"{path}: does not decode as an image ({error}); repair or remove it") from error


def _check_image(path: Path, image: Image.Image) -> None:
    pixels = image.width * image.height
    if pixels > _MAX_PIXELS:
        raise DataError(
            f"{path}: {pixels} pixels, but the bound is {_MAX_PIXELS}; scale the image down, or remove it"
        )
    if image.mode.startswith(("I", "F")):
        raise DataError(
            f"{path}: has pixels of more than 8 bits (mode {image.mode}); convert it to 8 bits, or pack it as .npy"
        )


def _without_alpha(image: Image.Image) -> Image.Image:
    """The picture on white, where it has transparent parts: what lies beneath them is arbitrary, often black."""
    if not image.has_transparency_data:
        return image
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer)
