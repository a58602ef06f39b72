"""Pictures as a source: decoded while packing, a few at a time, or kept as the bytes of their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.each import EachSource, Numbers, OnBad, OtherShapeError, make_samples, picked
from hpctrain.h5.fields import Field
from hpctrain.h5.options import SourceOptions
from hpctrain.h5.picture import (
    FORMATS,
    MAX_PIXELS,
    allow_pixels,
    check_encoded,
    decode_image,
    load_image,
    read_picture,
)
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import ArraySource, Columns

__all__ = ["IMAGE_SUFFIXES", "ImageSource", "decode_image", "load_image"]

IMAGE_SUFFIXES: Final = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
_MAX_TRIED: Final = 100  # pictures looked at for one that tells the size


class Pictures(Protocol):
    """Picture files, or what stands for them, by number."""

    def __len__(self) -> int: ...

    def name(self, number: int) -> str:
        """What messages call it."""
        ...

    def load(self, number: int) -> bytes:
        """Its bytes, not decoded; raises `DataError` or `StorageError`. Called from several threads at once."""
        ...

    def num_bytes(self) -> int:
        """Of all pictures together; may be an estimate."""
        ...


class FilePictures:
    """Pictures that are files of their own."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, number: int) -> str:
        """The path."""
        return str(self._paths[number])

    def load(self, number: int) -> bytes:
        """The bytes of the file."""
        return read_picture(self._paths[number])

    def num_bytes(self) -> int:
        """What the files hold now."""
        return sum(map(_bytes_of, self._paths))


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # told when it is read
        return 0


class PictureField:
    """Pictures as a field, by the options `size`, `gray`, `keep_encoded` and `max_pixels`.

    Decoded: uint8 of (H, W, 3), or (H, W) with `gray`. With `size`, they are scaled to `size` x `size` pixels (bicubic,
    antialiased); without, all must have the size of the first that decodes. Transparent parts become white; of an
    animation the first frame is taken; the camera's orientation is applied. With `keep_encoded`: the bytes of the
    files, each decoded once to see that it can be, and of `size` x `size` pixels where that is given.
    """

    def __init__(self, name: str, pictures: Pictures, how: SourceOptions) -> None:
        self.pictures, self._how = pictures, how
        # What is kept encoded is decoded while training, where the bound is the usual one.
        self._max_pixels = min(how.max_pixels, MAX_PIXELS) if how.keep_encoded else how.max_pixels
        allow_pixels(self._max_pixels)
        self._model = 0
        if how.keep_encoded:
            self.field = Field(name, "ragged", np.dtype(np.uint8), (), encoding="image")
        else:
            self.field = Field(name, "dense", np.dtype(np.uint8), self._shape())

    @property
    def fields(self) -> Mapping[str, Field]:
        """The one field, by its name."""
        return {self.field.name: self.field}

    def decode(self, data: bytes, where: str) -> dict[str, npt.NDArray[np.uint8]]:
        """The pixels of a picture, or its bytes, by the field's name; messages call it `where`.

        Raises `DataError` for one that does not decode, `OtherShapeError` for one of another size.
        """
        if self._how.keep_encoded:
            self._check_kept(where, check_encoded(data, where, self._max_pixels))
            return {self.field.name: np.frombuffer(data, np.uint8)}
        image = self._decoded(where, data)
        shape = self.field.sample_shape
        if image.shape != shape:
            raise OtherShapeError(
                f"{where}: {image.shape[1]} x {image.shape[0]} pixels, but {self.pictures.name(self._model)} has "
                f"{shape[1]} x {shape[0]}; give --size N to scale all to N x N"
            )
        return {self.field.name: image}

    def _shape(self) -> tuple[int, ...]:
        size = self._how.size
        if size is not None:
            return (size, size) if self._how.gray else (size, size, 3)
        refused: DataError | None = None
        for number in range(min(len(self.pictures), _MAX_TRIED)):
            try:
                shape = self._decoded(self.pictures.name(number), self.pictures.load(number)).shape
            except DataError as error:
                refused = refused or error
            else:
                self._model = number
                return shape
        if refused is not None:
            raise refused
        return ()

    def _decoded(self, name: str, data: bytes) -> npt.NDArray[np.uint8]:
        how = self._how
        sides = None if how.size is None else (how.size, how.size)
        return decode_image(data, name, sides, how.gray, FORMATS, self._max_pixels)

    def _check_kept(self, name: str, found: tuple[int, int]) -> None:
        size = self._how.size
        if size is not None and found != (size, size):
            raise OtherShapeError(
                f"{name}: {found[1]} x {found[0]} pixels, but --size {size} was given, and pictures kept encoded are "
                "not scaled; scale the files, or leave out --size or --keep-encoded"
            )


class ImageSource(EachSource):
    """Pictures (field `image`, as `PictureField` makes it) and further columns of equal length, in memory."""

    def __init__(
        self,
        pictures: Pictures,
        how: SourceOptions,
        columns: Mapping[str, npt.NDArray[Any] | Ragged] | None = None,
        classes: Sequence[str] | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._image = PictureField("image", pictures, how)
        self._columns = ArraySource(columns or {}, classes)
        self.classes = self._columns.classes
        self.warnings = warnings
        self.num_samples = len(pictures)
        self.fields: Mapping[str, Field] = {"image": self._image.field, **self._columns.fields}

    def read_each(self, start: int, stop: int, on_bad: OnBad) -> tuple[Columns, Numbers]:
        """Samples [start, stop), decoded or verified."""
        pictures = self._image.pictures
        images, good = make_samples(
            self._image.fields,
            lambda sample: self._image.decode(pictures.load(sample), pictures.name(sample)),
            start,
            stop,
            on_bad,
        )
        return {**images, **picked(self._columns.read(start, stop), good - start)}, good

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples; of pictures, what their files hold."""
        if name == "image":
            return self._image.pictures.num_bytes()
        return self._columns.num_values(name)
