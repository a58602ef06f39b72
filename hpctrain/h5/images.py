"""Pictures as a source: decoded while packing, a few at a time, or kept as the bytes of their files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.fields import Field
from hpctrain.h5.options import SourceOptions
from hpctrain.h5.picture import decode_image, load_image, read_encoded
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import ArraySource, Columns

__all__ = ["IMAGE_SUFFIXES", "ImageSource", "decode_image", "load_image", "open_image_folder"]

IMAGE_SUFFIXES: Final = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


class ImageSource:
    """Pictures (field `image`) and further columns of equal length.

    Decoded: uint8 of (H, W, 3), or (H, W) with `gray`. With `size`, they are scaled to `size` x `size` pixels (bicubic,
    antialiased); without, all must have the size of the first. Transparent parts become white; of an animation the
    first frame is taken; the camera's orientation is applied. With `keep_encoded`: the bytes of the files, each decoded
    once to see that it can be, and of `size` x `size` pixels where that is given. Raises `DataError` for a picture that
    does not decode or has another size.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        how: SourceOptions,
        columns: Mapping[str, npt.NDArray[Any] | Ragged] | None = None,
        classes: Sequence[str] | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._paths, self._how = list(paths), how
        self._columns = ArraySource(columns or {}, classes)
        self.classes = self._columns.classes
        self.warnings = warnings
        self.num_samples = len(self._paths)
        if how.keep_encoded:
            image = Field("image", "ragged", np.dtype(np.uint8), (), encoding="image")
        else:
            shape = load_image(self._paths[0], how.size, how.gray).shape if self._paths else ()
            image = Field("image", "dense", np.dtype(np.uint8), shape)
        self.fields = {"image": image, **self._columns.fields}

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop), decoded or verified."""
        paths = self._paths[start:stop]
        images = self._encoded(paths) if self._how.keep_encoded else self._decoded(paths)
        return {"image": images, **self._columns.read(start, stop)}

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples; of pictures, what their files hold now."""
        if name == "image" and self._how.keep_encoded:
            # One that is not there is told when it is read.
            return sum(path.stat().st_size for path in self._paths if path.is_file())
        return self._columns.num_values(name)

    def _decoded(self, paths: Sequence[Path]) -> npt.NDArray[np.uint8]:
        shape = self.fields["image"].sample_shape
        images = np.empty((len(paths), *shape), np.uint8)
        for row, path in enumerate(paths):
            image = load_image(path, self._how.size, self._how.gray)
            if image.shape != shape:
                raise DataError(
                    f"{path}: {image.shape[1]} x {image.shape[0]} pixels, but {self._paths[0]} has "
                    f"{shape[1]} x {shape[0]}; give --size N to scale all to N x N"
                )
            images[row] = image
        return images

    def _encoded(self, paths: Sequence[Path]) -> Ragged:
        files = (read_encoded(path, self._how.size) for path in paths)
        return Ragged.from_rows((np.frombuffer(data, np.uint8) for data in files), np.uint8)


def open_image_folder(root: Path, how: SourceOptions) -> ImageSource:
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
    return ImageSource(paths, how, columns, [folder.name for folder in folders], left_out)


def _files_below(folder: Path) -> list[Path]:
    """All files below a folder, hidden ones aside, sorted by their relative name."""
    files = [
        Path(at) / name for at, _, names in os.walk(folder) for name in names if not name.startswith(".")
    ]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())
