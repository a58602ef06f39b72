"""Mean and standard deviation of a field, chunk by chunk, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_IMAGE_CHANNELS = (1, 3, 4)


def channels_of(sample_shape: tuple[int, ...]) -> int | None:
    """Channels of an image field (three axes, the last of 1, 3 or 4); None for anything else."""
    return sample_shape[-1] if len(sample_shape) == 3 and sample_shape[-1] in _IMAGE_CHANNELS else None


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations, per channel (shape (C,), C = 1 for fields without channels)."""

    count: int
    mean: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]

    @classmethod
    def of(cls, values: npt.NDArray[Any], channels: int | None) -> Moments:
        """The moments of one array (rows, *sample_shape)."""
        planes = values.reshape(-1, channels or 1)
        mean = np.empty(planes.shape[1])
        squares = np.empty(planes.shape[1])
        with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite make the result so
            for channel in range(planes.shape[1]):  # channel by channel: NumPy sums contiguous runs best
                plane = planes[:, channel].astype(np.float64)
                mean[channel] = plane.mean()
                plane -= mean[channel]
                squares[channel] = np.square(plane, out=plane).sum()
        return cls(len(planes), mean, squares)

    def merged(self, other: Moments) -> Moments:
        """The moments of both together (Chan, Golub, LeVeque 1979: pairwise update)."""
        count = self.count + other.count
        with np.errstate(invalid="ignore", over="ignore"):
            delta = other.mean - self.mean
            mean = self.mean + delta * (other.count / count)
            squares = self.squares + other.squares + delta**2 * (self.count * other.count / count)
        return Moments(count, mean, squares)

    @property
    def std(self) -> npt.NDArray[np.float64]:
        """Population standard deviation."""
        deviation: npt.NDArray[np.float64] = np.sqrt(self.squares / self.count)
        return deviation
