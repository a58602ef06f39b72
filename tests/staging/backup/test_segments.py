"""Segments: what was written is found again, with its index and without."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.h5.index import digest_of
from hpctrain.staging.backup import segments
from hpctrain.staging.backup.segments import SegmentWriter, name_of, read_rows
from tests.staging.backup.sets import flip


def write(folder: Path, contents: list[bytes]) -> list[Path]:
    writer = SegmentWriter(folder)
    for content in contents:
        writer.put(name_of(content), content)
    writer.finish()
    return sorted(folder.glob(f"*{segments.SUFFIX}"))


def found(path: Path, rows: np.ndarray) -> list[bytes]:
    """The objects, those whose bytes match their names."""
    whole = path.read_bytes()
    parts = [whole[int(row["offset"]) : int(row["offset"]) + int(row["size"])] for row in rows]
    return [part for part, row in zip(parts, rows, strict=True) if name_of(part) == row["digest"].tobytes()]


@settings(max_examples=20, deadline=None)
@given(contents=st.lists(st.binary(max_size=300), max_size=12), end=st.integers(0, 10_000), data=st.data())
def test_objects_are_found_whatever_is_cut_off_or_damaged(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], end: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("segments")
    paths = write(folder, contents)
    assert len(paths) == (1 if contents else 0)
    for path in paths:
        rows, problem = read_rows(path)
        assert (found(path, rows), problem) == (contents, None)
        whole = path.read_bytes()
        path.write_bytes(whole[:end])
        rows, problem = read_rows(path)
        kept = [c for c, at in zip(contents, ends(contents), strict=True) if at <= min(end, len(whole))]
        assert found(path, rows)[: len(kept)] == kept  # the index's own bytes may look like one record more
        assert problem is None if end >= len(whole) else "index is damaged or cut off" in str(problem)
        path.write_bytes(whole)
        flip(path, data.draw(st.integers(0, len(whole) - 1)))
        assert set(found(path, read_rows(path)[0])) <= set(contents)


def test_an_index_with_places_outside_is_not_used(tmp_path: Path) -> None:
    """Whoever asks for what is read there would ask for all memory."""
    (path,) = write(tmp_path, [b"one", b"two"])
    whole = path.read_bytes()
    rows = np.frombuffer(whole[-24 - 2 * segments.ROW.itemsize : -24], segments.ROW)
    for place in ({"size": 2**62}, {"offset": 2**63}, {"offset": 2**64 - 1, "size": 2}):
        forged = rows.copy()
        for name, value in place.items():
            forged[name][1] = value
        index = forged.tobytes()
        end = struct.pack("<8sQQ", b"segm end", 2, digest_of(index))
        path.write_bytes(whole[: -24 - len(index)] + index + end)
        found_rows, problem = read_rows(path)
        assert found(path, found_rows)[:2] == [b"one", b"two"]
        assert "index is damaged or cut off" in str(problem)


def ends(contents: list[bytes]) -> list[int]:
    return [int(at) for at in 16 + np.cumsum([48 + len(content) for content in contents])]


def test_full_segments_are_sealed_while_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4000)
    writer = SegmentWriter(tmp_path)
    contents = [bytes([number]) * (200 + number) for number in range(120)]

    def put(part: list[bytes]) -> None:
        for content in part:
            writer.put(name_of(content), content)

    threads = [threading.Thread(target=put, args=(contents[first::4],)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    writer.finish()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) >= 6
    assert all(path.suffix == segments.SUFFIX and path.stat().st_size < 8000 for path in paths)
    assert sorted(item for path in paths for item in found(path, read_rows(path)[0])) == sorted(contents)
    assert writer.sealed_bytes == sum(path.stat().st_size for path in paths)


def test_what_is_abandoned_leaves_nothing(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.put(name_of(b"x"), b"x")
    assert [path.name[0] for path in tmp_path.iterdir()] == ["."]
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
