"""One process that opens files for all tests: each start takes half a second."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hpctrain.staging.verify import verification
from hpctrain.staging.verify.child import Child


class _Kept(Child):
    def __exit__(self, *_: object) -> None:
        """Stays for the next test."""


@functools.cache
def _kept() -> Child:
    child = _Kept()
    atexit.register(child.close)
    return child


@contextmanager
def one_child() -> Iterator[None]:
    """Within, `verify_set` uses the same child again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "Child", _kept)
        yield
