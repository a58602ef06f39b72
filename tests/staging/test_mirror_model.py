"""A mirror against a dictionary: whatever is done in whatever order, what is read is right or absent, and adds up."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpctrain.staging.mirror import DamagedChunkError, Mirror
from hpctrain.staging.mirror.holes import Holes
from tests.staging.mirrors_support import chunk_of, made_up_set, owned, write

sizes_of_sets = st.lists(st.sampled_from([-1, 0, 1, 700, 4096, 5000, 12_288]), min_size=1, max_size=8)
numbers = st.integers(0, 7)


class MirrorMachine(RuleBasedStateMachine):
    """`present` is the model: the slots that must be there, and whether their bytes are whole."""

    @initialize(
        sizes=sizes_of_sets,
        num_files=st.integers(1, 3),
        has_digests=st.booleans(),
        gap_bytes=st.sampled_from([0, 100]),
        quota_bytes=st.sampled_from([None, 0, 9000, 10**6]),
    )
    def open(self, sizes, num_files, has_digests, gap_bytes, quota_bytes) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.stored = made_up_set(sizes, num_files=num_files, has_digests=has_digests, gap_bytes=gap_bytes)
        self.sizes = self.stored.sizes.tolist()
        self.quota_bytes = quota_bytes
        self.mirror = owned(self.folder, self.stored, quota_bytes)
        self.present: dict[int, bool] = {}

    def slot(self, number: int) -> int:
        return number % len(self.sizes)

    @rule(number=numbers)
    def write(self, number: int) -> None:
        slot = self.slot(number)
        if not self.sizes[slot] or slot in self.present:
            write(self.mirror, self.stored, slot)
        elif self.mirror.quota_bytes - self.model_bytes() >= self.sizes[slot]:
            write(self.mirror, self.stored, slot)
            self.present[slot] = True
        else:
            with pytest.raises(OSError, match="the quota is"):
                write(self.mirror, self.stored, slot)

    @rule(number=numbers)
    def evict(self, number: int) -> None:
        slot = self.slot(number)
        assert self.mirror.evict(slot) == (slot in self.present)
        self.present.pop(slot, None)

    @rule(number=numbers)
    def forget(self, number: int) -> None:
        self.mirror.forget(self.slot(number))
        self.present.pop(self.slot(number), None)

    @rule(number=numbers)
    def read(self, number: int) -> None:
        slot = self.slot(number)
        try:
            found = self.mirror.read(slot)
        except DamagedChunkError:
            assert not self.present[slot]
            return
        if slot in self.present or not self.sizes[slot]:
            assert bytes(found) == chunk_of(slot, self.sizes[slot])
        else:
            assert found is None
        assert self.present.get(slot, True)

    @rule(number=numbers, place=st.integers(0, 10**6))
    def damage(self, number: int, place: int) -> None:
        slot = self.slot(number)
        if self.present.get(slot):
            place = int(self.stored.offsets[slot]) + place % self.sizes[slot]
            path = self.mirror.path / f"{self.stored.files[slot]}.data"
            with path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1]))
            self.present[slot] = False

    @precondition(lambda self: not self.stored.has_digests)
    @rule(number=numbers)
    def lose_the_digest(self, number: int) -> None:
        slot = self.slot(number)
        with (self.mirror.path / "digests.u64").open("r+b") as file:
            file.seek(8 * slot)
            file.write(bytes(8))
        if slot in self.present:
            self.present[slot] = False

    @rule(lose_the_map=st.booleans())
    def reopen(self, lose_the_map: bool) -> None:
        self.mirror.close()
        if lose_the_map:
            (self.mirror.path / "present.map").unlink()
            self.present = {}
        self.mirror = owned(self.folder, self.stored, self.quota_bytes)

    @invariant()
    def the_books_balance(self) -> None:
        there = [slot in self.present or not size for slot, size in enumerate(self.sizes)]
        assert self.mirror.present().tolist() == there
        assert [self.mirror.has(slot) for slot in range(len(there))] == there
        assert self.mirror.present_bytes == self.model_bytes() <= self.mirror.quota_bytes
        other = Mirror(self.folder, self.stored)
        assert other.present_bytes == self.model_bytes(), "others count the same from the map"
        other.close()

    @invariant()
    def no_more_space_is_taken_than_blocks_of_what_is_there(self) -> None:
        blocks = {
            (int(self.stored.files[slot]), block)
            for slot in self.present
            for block in range(
                int(self.stored.offsets[slot]) // 4096,
                (int(self.stored.offsets[slot]) + self.sizes[slot] - 1) // 4096 + 1,
            )
        }
        taken_bytes = sum(path.stat().st_blocks * 512 for path in self.mirror.path.glob("*.data"))
        assert taken_bytes <= 4096 * len(blocks)

    def model_bytes(self) -> int:
        return sum(self.sizes[slot] for slot in self.present)

    def teardown(self) -> None:
        if hasattr(self, "mirror"):
            self.mirror.close()
            shutil.rmtree(self.folder)


MirrorMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestMirror = MirrorMachine.TestCase


@given(sizes_of_sets, st.integers(1, 2), st.integers(0, 600), st.sets(numbers), st.sampled_from([512, 4096]))
@settings(max_examples=100, deadline=None)
def test_holes_take_whole_blocks_that_nobody_else_is_in(sizes, num_files, gap_bytes, taken, block) -> None:
    stored = made_up_set(sizes, num_files=num_files, gap_bytes=gap_bytes)
    holes = Holes(stored.files, stored.offsets, stored.sizes, block)
    for slot in np.flatnonzero(stored.sizes).tolist():
        others = [
            range(int(stored.offsets[one]), int(stored.offsets[one] + stored.sizes[one]))
            for one in taken - {slot}
            if one < len(sizes) and stored.sizes[one] and stored.files[one] == stored.files[slot]
        ]
        begin, end = holes.hole(slot, lambda one: one in taken)
        first, stop = int(stored.offsets[slot]), int(stored.offsets[slot] + stored.sizes[slot])
        assert begin <= first < stop <= end
        assert not any(begin < other.stop and other.start < end for other in others)
        lowest, highest = first // block * block, -(-stop // block) * block
        if not any(lowest < other.stop and other.start < first for other in others):
            assert begin == lowest
        if not any(stop <= other.start < highest for other in others):
            assert end == highest
