"""All fields of a batch: which of them are preprocessed, and what the Task gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from hpctrain.data.preprocess.draws import Draws
from hpctrain.data.preprocess.field import FieldPreprocessor
from hpctrain.data.preprocess.samples import FirstSample, Rows, SampleFunction
from hpctrain.data.preprocess.steps import FieldSteps, known
from hpctrain.errors import ConfigError
from hpctrain.h5.fields import Field

Empty: TypeAlias = Callable[[tuple[int, ...], npt.DTypeLike], NDArray[Any]]
"""Gives an array of this shape and type, of any content."""


class Preprocessor:
    """The preprocessing of one set for one seed. Safe to use from several threads.

    Attributes:
        fields: by name, the fields that have steps.
        outputs: by name, all fields of the batch as the Task gets them: types and shapes after the steps, and
            statistics where they still hold (moving pixels and changing the type keeps them).
        warnings: what was assumed, to be shown once.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        steps: Mapping[str, FieldSteps],
        seed: int,
        *,
        first: FirstSample,
        functions: Mapping[str, SampleFunction],
        source: str,
        training: bool = True,
    ) -> None:
        """Checks everything that can be known before the first batch.

        Args:
            fields: the fields of the set. For evaluation, `mean` and `std` are to be the training set's.
            steps: by name of the field.
            seed: of the run.
            first: gives sample 0 of a field; called only for fields whose result cannot be known otherwise.
            functions: the users' functions, by the name that the steps use for them.
            source: names the set in messages.
            training: False: nothing is random; named augmentations are left out, functions get None as `rng`.

        Raises:
            ConfigError: unknown fields, augmentations or types (with the nearest name), steps that do not fit the
                field or each other, statistics that the set lacks.
            DataError: sample 0 does not decode, or the function fails on it.
        """
        self.fields: dict[str, FieldPreprocessor] = {}
        self.outputs = dict(fields)
        for name, field_steps in steps.items():
            known("data.preprocess, field", name, fields)
            function = None if field_steps.function is None else functions[field_steps.function]
            processor = FieldPreprocessor(
                fields[name], field_steps, function, Draws(seed, name), first, source, training
            )
            self.fields[name] = processor
            for output in processor.outputs:
                if output.name != name and output.name in fields:
                    raise ConfigError(
                        f"data.preprocess.{name}.pad_to makes the field {output.name!r}, which the set has already; "
                        "rename that field and pack the set again"
                    )
                self.outputs[output.name] = output
        self.warnings = tuple(text for field in self.fields.values() for text in field.warnings)

    def apply(
        self, batch: Mapping[str, Rows], samples: NDArray[np.int64], epoch: int, empty: Empty = np.empty
    ) -> dict[str, Rows]:
        """A batch in stored types as the Task gets it; fields without steps are passed on as they are.

        `samples`: the ids of its rows, int64 (B,). For errors see `FieldPreprocessor.run`, which may be called
        instead, from several threads for parts of the rows.
        """
        result: dict[str, Rows] = {}
        for name, rows in batch.items():
            if name not in self.fields:
                result[name] = rows
                continue
            processor = self.fields[name]
            outs = [empty((len(samples), *field.sample_shape), field.dtype) for field in processor.outputs]
            processor.run(rows, samples, epoch, outs)
            result.update(zip((field.name for field in processor.outputs), outs, strict=True))
        return result
