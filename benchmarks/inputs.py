"""What is packed and read: pictures like those people train on, and smooth fields like those of simulations."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.environment import ROOT
from hpctrain.errors import DataError

CIFAR: Final = ROOT.parent / "shared" / "data" / "cifar10-jpeg.tar"
"""CIFAR-10 as JPEG files, where it lies beside the checkout."""
_CIFAR_TEST_PICTURES: Final = 10_000  # the first, sorted by class
_CIFAR_PICTURES: Final = 60_000
_SIDE: Final = 32
_SPECTRUM_SLOPE: Final = -1.0  # amplitudes of natural pictures fall as 1/f (Field 1987)
_FIELD_SLOPE: Final = -2.0  # smoother, as solutions of differential equations are

Pictures = npt.NDArray[np.uint8]


def pictures(count: int, archive: Path = CIFAR) -> tuple[Pictures, str]:
    """`count` colour pictures (count, 32, 32, 3), and what they are in words.

    Decoded from the archive where there is one, else synthetic. Raises `DataError` for an archive that cannot be read
    or holds too few.
    """
    if not archive.exists():
        return synthetic_pictures(count), f"{count} synthetic 32 x 32 RGB pictures with a 1/f spectrum"
    try:
        found = list(_decoded(archive, count))
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{archive}: cannot be read: {error}; remove it to use synthetic pictures") from error
    if len(found) < count:
        raise DataError(
            f"{archive}: {len(found)} of {count} pictures could be taken, for it holds fewer than "
            f"{_num_among(count)}; put the whole archive there, or remove it to use synthetic pictures"
        )
    return np.stack(found), f"{count} CIFAR-10 pictures of all classes (JPEG, decoded), 32 x 32 RGB"


def _num_among(count: int) -> int:
    """Of how many pictures in the archive `count` are taken: the first part alone is read where it has enough."""
    return _CIFAR_TEST_PICTURES if count <= _CIFAR_TEST_PICTURES else _CIFAR_PICTURES


def _decoded(archive: Path, count: int) -> Iterator[Pictures]:
    """Pictures spread evenly over the archive, whose parts are sorted by class."""
    wanted = {number * _num_among(count) // count for number in range(count)}
    last, seen = max(wanted, default=-1), -1
    with tarfile.open(archive) as tar:
        for member in tar:
            if not (member.isfile() and member.name.endswith(".jpg")):
                continue
            seen += 1
            if seen > last:
                return
            stream = tar.extractfile(member) if seen in wanted else None
            if stream is not None:
                yield _picture(stream.read())


def _picture(encoded: bytes) -> Pictures:
    with Image.open(io.BytesIO(encoded)) as image:
        decoded = np.asarray(image.convert("RGB"))
    if decoded.shape != (_SIDE, _SIDE, 3):
        raise DataError(f"a picture has shape {decoded.shape}, but ({_SIDE}, {_SIDE}, 3) is needed")
    return decoded


def synthetic_pictures(count: int, seed: int = 0) -> Pictures:
    """Pictures (count, 32, 32, 3) whose amplitudes fall as 1/f, the three colours mostly alike."""
    grey = random_fields((count, 1), _SIDE, _SPECTRUM_SLOPE, seed)
    colour = random_fields((count, 3), _SIDE, _SPECTRUM_SLOPE, seed + 1)
    values = np.moveaxis(127.5 + 45 * grey + 15 * colour, 1, -1)
    return np.ascontiguousarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))


def smooth_fields(count: int, side: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Scalar fields (count, side, side) of mean 0 and deviation 1, amplitudes falling as 1/f^2."""
    return random_fields((count,), side, _FIELD_SLOPE, seed)


def random_fields(shape: tuple[int, ...], side: int, slope: float, seed: int) -> npt.NDArray[np.float32]:
    """Gaussian fields (*shape, side, side) with amplitudes |f|^slope, each of mean 0 and deviation 1."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    frequency[0, 0] = np.inf  # no mean
    spectrum = np.fft.rfft2(rng.standard_normal((*shape, side, side))) * frequency**slope
    values = np.fft.irfft2(spectrum, (side, side))
    return np.asarray(values / values.std(axis=(-2, -1), keepdims=True), np.float32)
