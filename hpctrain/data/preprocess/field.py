"""One field: from rows in the stored type to those the Task gets, a block of rows after the other.

What an object needs is fixed at set-up, among it shape and type of the result; `run` changes nothing of it, so any
number of threads may work on different rows of one batch. Blocks are small enough to stay in a core's cache from the
first step to the last, which also bounds what a thread holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.preprocess.augment import Augmentation, add_noise, move, parse_augmentations
from hpctrain.data.preprocess.convert import Conversion
from hpctrain.data.preprocess.draws import Draws
from hpctrain.data.preprocess.samples import Array, FirstSample, FirstSteps, Rows, SampleFunction
from hpctrain.data.preprocess.steps import FieldSteps, check_steps, where
from hpctrain.errors import ConfigError
from hpctrain.h5.fields import Field
from hpctrain.h5.scratch import Scratch

LENGTH_SUFFIX: Final = "_length"

_BLOCK: Final = 1 << 17
"""Values per block: 512 KiB of float32."""


class FieldPreprocessor:
    """The steps of one field.

    Attributes:
        outputs: the fields of the batch it makes: itself, dense, and after padding `NAME_length`.
        warnings: what was assumed, to be shown once.
    """

    def __init__(
        self,
        field: Field,
        steps: FieldSteps,
        function: SampleFunction | None,
        draws: Draws,
        first: FirstSample,
        source: str,
        training: bool,
    ) -> None:
        check_steps(field.name, steps)
        self._draws, self._scratch = draws, Scratch()
        self._first_steps = FirstSteps(field, steps, function, draws, first, source, training)
        shape, dtype = self._first_steps.shape, self._first_steps.dtype
        self._conversion = Conversion(field, steps, shape, dtype, source)
        augmentations = parse_augmentations(field.name, steps.augment, shape)
        self._moves = [item for item in augmentations if item.name != "noise" and training]
        self._noise = [item for item in augmentations if item.name == "noise" and training]
        if any(item.name == "noise" for item in augmentations) and self._conversion.dtype.kind != "f":
            raise ConfigError(
                f"{where(field.name)}.augment: noise needs a float type, these values are "
                f'{self._conversion.dtype}; add dtype = "float32", or normalize'
            )
        self._block_rows = max(1, _BLOCK // max(1, math.prod(shape)))
        self.warnings = tuple(self._conversion.warnings)
        self.outputs = self._outputs(field, steps)

    def _outputs(self, field: Field, steps: FieldSteps) -> tuple[Field, ...]:
        output = Field(field.name, "dense", self._conversion.dtype, self._first_steps.shape, field.codec)
        if field.kind == "dense" and not (steps.function or steps.normalizes):
            output = replace(output, mean=field.mean, std=field.std)
        if steps.pad_to is None:
            return (output,)
        return (output, Field(field.name + LENGTH_SUFFIX, "dense", np.dtype(np.int64), ()))

    def run(self, rows: Rows, samples: NDArray[np.int64], epoch: int, outs: Sequence[Array]) -> None:
        """Write the result for `rows` (B of them, of the global sample ids `samples`) to `outs`.

        Args:
            rows: in the stored type, (B, *shape), or a `Ragged` of B rows; not changed.
            samples: int64 (B,).
            epoch: epochs get random numbers of their own.
            outs: for each of `outputs` a C-contiguous array of (B, *sample_shape) in its type.

        Raises:
            DataError: naming set, field, sample and cause: a picture that does not decode, a function that
                raises or returns another shape or type than for the first sample, a value that does not fit.
        """
        moves = self._words(self._moves, samples, epoch)
        noise = self._words(self._noise, samples, epoch)
        for start in range(0, len(samples), self._block_rows):
            part = slice(start, min(start + self._block_rows, len(samples)))
            values, lengths = self._first_steps.read(rows, part, samples[part], epoch)
            if moves:
                values = move(values, [(item, words[part]) for item, words in moves], self._scratch)
            self._conversion(values, samples[part], outs[0][part])
            for item, words in noise:
                add_noise(outs[0][part], words[part], item.value)
            if lengths is not None:
                outs[1][part] = lengths

    def _words(
        self, items: list[Augmentation], samples: NDArray[np.int64], epoch: int
    ) -> list[tuple[Augmentation, NDArray[np.uint64]]]:
        return [(item, self._draws.words(item.name, epoch, samples)) for item in items]
