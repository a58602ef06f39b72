"""The errors of hpctrain: one small hierarchy, derived from the builtins people catch.

Each class carries the code a process ends with (the numbers follow ``sysexits.h`` where it has one) and, through it,
the failure class that the supervisor acts on (`hpctrain.resilience.exits`). A message says the value, the bound and
what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class HpctrainError(Exception):
    """Base of all errors raised on purpose by hpctrain."""

    exit_code: ClassVar[int] = 70


class UsageError(HpctrainError, ValueError):
    """A command was called with arguments that cannot work (EX_USAGE)."""

    exit_code = 64


class DataError(HpctrainError, ValueError):
    """Source data is bad: undecodable, truncated, a digest that does not match (EX_DATAERR). Never retried."""

    exit_code = 65


class BuildError(HpctrainError, RuntimeError):
    """Horovod could not be built, or what was built cannot be used (EX_UNAVAILABLE)."""

    exit_code = 69


class HangError(HpctrainError, TimeoutError):
    """A wait went past its deadline."""

    exit_code = 71


class StorageError(HpctrainError, OSError):
    """Storage failed although the data are believed good: I/O errors, no space, a bad mirror (EX_IOERR)."""

    exit_code = 74


class ConfigError(HpctrainError, ValueError):
    """The run description, or the machine it is to run on, is wrong (EX_CONFIG). Never retried."""

    exit_code = 78


class PeerError(HpctrainError, ConnectionError):
    """Another rank was lost. Never the cause of a failure: the supervisor looks for another."""

    exit_code = 76
