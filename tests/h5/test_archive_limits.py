"""Bounds on archives and on single values."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import DataError
from hpctrain.h5.archive_limits import MAX_MEMBER_BYTES, ArchiveCount, check_member_bytes, check_name
from hpctrain.h5.options import SourceOptions

PATH = Path("x.tar")


@pytest.mark.parametrize("name", ["/a", "//a", "..", "../a", "a/..", "a/../b", "./../a"])
def test_names_that_lead_out(name: str) -> None:
    with pytest.raises(DataError, match=rf"x.tar: the entry '{name}' points out of the archive"):
        check_name(PATH, name)


@pytest.mark.parametrize("name", ["", "a", "./a", "a/b", "..a", "a..", "a/...", "a//b", "\\a"])
def test_names_that_stay_in(name: str) -> None:
    check_name(PATH, name)


def test_entries_and_bytes_are_counted_together() -> None:
    count = ArchiveCount(PATH, SourceOptions(max_entries=3, max_archive_gib=10 / (1 << 30)))
    count.add("a", 4)
    count.add("b", 6)
    with pytest.raises(
        DataError, match=r"x.tar: unpacks to more than .* GiB with entry 'c'; allow more with"
    ):
        count.add("c", 1)
    with pytest.raises(
        DataError, match=r"x.tar: has more than 3 entries \(first beyond: 'd'\); allow more with"
    ):
        count.add("d", 0)


def test_one_value() -> None:
    check_member_bytes("x", MAX_MEMBER_BYTES)
    with pytest.raises(DataError, match=f"x: {MAX_MEMBER_BYTES + 1} bytes, but the bound of one value is"):
        check_member_bytes("x", MAX_MEMBER_BYTES + 1)
