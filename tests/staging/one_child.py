"""One process that opens files for all tests of a module: each start takes half a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hpctrain.staging.verify import verification
from hpctrain.staging.verify.child import Child


class _Kept(Child):
    def __exit__(self, *_: object) -> None:
        """Stays for the next test."""


@contextmanager
def one_child() -> Iterator[None]:
    """Within, `verify_set` uses the same child again and again."""
    kept = _Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "Child", lambda: kept)
        yield
    kept.close()
