"""Slurm's short forms: lists of hosts (`gpu[1-3,07]`) and of counts (`2(x3),1`)."""

from __future__ import annotations

import re

from hpctrain.errors import ConfigError

_COMMA_OUTSIDE = re.compile(r",(?![^\[]*\])")  # of brackets
_NAMES = re.compile(r"([^\[\],]*)(?:\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\])?([^\[\],]*)")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodes(text: str) -> list[str]:
    """The names in a Slurm hostlist such as `gpu[1-3,07],login2` (one level of brackets), in its order.

    Raises:
        ConfigError: it cannot be read.
    """
    names: list[str] = []
    for item in filter(None, _COMMA_OUTSIDE.split(text)):
        match = _NAMES.fullmatch(item)
        if match is None:
            raise ConfigError(
                f"SLURM_JOB_NODELIST: {item!r} in {text!r} cannot be read; names such as gpu[1-3,07] are expected"
            )
        head, ranges, tail = match.groups()
        names += [f"{head}{number}{tail}" for number in _numbers(ranges)] if ranges else [item]
    return names


def expand_counts(text: str) -> list[int]:
    """The numbers in Slurm's short form, such as `2(x3),1`: 2, 2, 2, 1."""
    return [
        int(match[1])
        for part in text.split(",")
        if (match := _REPEATED.fullmatch(part))
        for _ in range(int(match[2] or 1))
    ]


def _numbers(ranges: str) -> list[str]:
    """The numbers in `1-3,07`, with their leading zeros."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers
