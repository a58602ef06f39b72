"""Staging with one node and with several: what is read from where, and what happens when something is bad."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.chunks import Allocate, FileSource, fresh
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.packed import PackedSet
from hpctrain.h5.userset import open_files
from hpctrain.resilience import faults
from hpctrain.staging.owners import NEVER, Uses
from hpctrain.staging.source import StagedSource
from hpctrain.staging.stored import Slots, file_keys_of, stored_chunks
from hpctrain.staging.wire import PeerFailure, Reply
from tests.staging.nodes import Nodes, everything, read_shared, same, wait_for
from tests.support import small_set


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    return small_set(tmp_path / "shared" / "set", 503, 12)


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Fault rules for this process; set `HPCTRAIN_FAULTS`."""
    yield monkeypatch
    monkeypatch.delenv("HPCTRAIN_FAULTS", raising=False)
    faults.configure(0, 1)


class NoShared:
    """A shared filesystem that must not be read."""

    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> bytes:
        raise AssertionError(f"{index.dataset}: chunk {chunk} was read from the shared file")


def unlink_shared(packed: PackedSet) -> None:
    for shard in packed.shards:
        shard.path.unlink()


def mirror_file(nodes: Nodes, node: int, number: int) -> Path:
    """The copy of a shared file in a node's mirror."""
    return nodes.agents[node].node.mirrors[0].path / f"{number}.data"


def damage(nodes: Nodes, node: int, slot: int) -> None:
    """Flip a bit of a chunk in a node's mirror."""
    stored = nodes.stored
    with mirror_file(nodes, node, int(stored.files[slot])).open("r+b") as file:
        file.seek(int(stored.offsets[slot]) + int(stored.sizes[slot]) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def test_once_staged_nothing_is_read_from_the_shared_file(tmp_path: Path, packed: PackedSet) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        nodes.deal()
        nodes.join()
        assert nodes.counter("shared_bytes") == [nodes.stored.num_bytes]
        unlink_shared(packed)
        assert same(everything(packed, nodes.source(0, NoShared())), expected)
        status = nodes.agents[0].node.status()
        assert (status["present_bytes"], status["done"]) == (nodes.stored.num_bytes, True)
        assert nodes.words(0) == nodes.warnings == []


def test_ranks_that_read_while_nothing_is_staged_yet_have_each_chunk_read_once(
    tmp_path: Path, packed: PackedSet
) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        sources = [nodes.source(0, NoShared()) for _ in range(4)]
        results: list[list[dict]] = []
        threads = [
            threading.Thread(target=lambda one=one: results.append(everything(packed, one)))
            for one in sources
        ]
        for thread in threads:
            thread.start()
        nodes.deal()  # the stager runs beside them
        for thread in threads:
            thread.join(30)
        nodes.join()
        assert len(results) == 4
        assert all(same(result, expected) for result in results)
        assert nodes.counter("shared_bytes") == [nodes.stored.num_bytes]


@pytest.mark.parametrize("order", ["global", "node_local"])
def test_three_nodes_read_each_chunk_once_over_all_epochs(
    tmp_path: Path, packed: PackedSet, order: str
) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / f"ssd{node}" for node in range(3)]) as nodes:
        deal = nodes.deal(order)
        sources = [nodes.source(node, NoShared()) for node in range(3)]
        for _ in range(2):
            assert all(same(everything(packed, source), expected) for source in sources)
        nodes.join()
        assert sum(nodes.counter("shared_bytes")) == nodes.stored.num_bytes
        owned = [int(nodes.stored.sizes[deal.owners == node].sum()) for node in range(3)]
        assert nodes.counter("shared_bytes") == owned
        assert sum(nodes.counter("peer_bytes")) == sum(nodes.counter("served_bytes")) > 0


def test_a_requeue_to_other_nodes_in_another_order_reads_nothing_again(
    tmp_path: Path, packed: PackedSet
) -> None:
    folders = [tmp_path / f"ssd{node}" for node in range(3)]
    with Nodes(packed, folders) as nodes:
        nodes.deal()
        nodes.join()
    with Nodes(packed, folders[::-1]) as nodes:
        nodes.deal()
        nodes.join()
        unlink_shared(packed)
        for node in range(3):
            everything(packed, nodes.source(node, NoShared()))
        assert nodes.counter("shared_bytes") == [0, 0, 0]


def test_with_replicas_a_lost_node_costs_nothing_from_the_shared_filesystem(
    tmp_path: Path, packed: PackedSet
) -> None:
    folders = [tmp_path / f"ssd{node}" for node in range(3)]
    with Nodes(packed, folders, replicas=2) as nodes:
        nodes.deal()
        nodes.join()
        assert sum(nodes.counter("shared_bytes")) == nodes.stored.num_bytes, "copies come from the owner"
        kept = [agent.node.tiers.present().sum() for agent in nodes.agents]
        assert sum(kept) == 2 * nodes.stored.num_slots
    shutil.rmtree(folders[1])
    with Nodes(packed, folders, replicas=2) as nodes:
        nodes.deal()
        nodes.join()
        for node in range(3):
            everything(packed, nodes.source(node, NoShared()))
        assert nodes.counter("shared_bytes") == [0, 0, 0]


def test_a_damaged_chunk_comes_from_a_replica_before_the_shared_filesystem(
    tmp_path: Path, packed: PackedSet
) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / f"ssd{node}" for node in range(2)], replicas=2) as nodes:
        deal = nodes.deal()
        nodes.join()
        unlink_shared(packed)
        slot = int(np.flatnonzero((deal.owners == 0) & (nodes.stored.sizes > 8))[0])
        damage(nodes, 0, slot)
        assert same(everything(packed, nodes.source(0, NoShared())), expected)
        assert nodes.counter("damaged_chunks") == [1, 0]
        assert len(nodes.words(0)) == 1
        everything(packed, nodes.source(0, NoShared()))
        assert nodes.counter("damaged_chunks") == [1, 0], "it was mended"


def test_a_map_that_outran_its_data_is_found_out(tmp_path: Path, packed: PackedSet) -> None:
    """After a power cut the map may say present where the data never reached the disk."""
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        (nodes.agents[0].node.mirrors[0].path / "present.map").write_bytes(b"\1" * nodes.stored.num_slots)
        nodes.deal()
        assert same(everything(packed, nodes.source(0, NoShared())), expected)
        assert nodes.counter("damaged_chunks") == [int((nodes.stored.sizes > 0).sum())]
        assert len(nodes.words(0)) == 1


def test_a_mirror_file_cut_short_is_read_around(tmp_path: Path, packed: PackedSet) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        nodes.deal()
        nodes.join()
        for number in range(len(packed.shards)):
            os.truncate(mirror_file(nodes, 0, number), 100)
        assert same(everything(packed, nodes.source(0, NoShared())), expected)


@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_a_disk_that_takes_no_more_costs_one_warning(
    fault: str, tmp_path: Path, packed: PackedSet, injected: pytest.MonkeyPatch
) -> None:
    expected = read_shared(packed)
    injected.setenv("HPCTRAIN_FAULTS", f"{fault}@staging.write:nth=20")
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        nodes.deal()
        assert same(everything(packed, nodes.source(0, NoShared())), expected)
        assert same(everything(packed, nodes.source(0, NoShared())), expected)
        nodes.join()
        words = nodes.words(0)
    assert len(words) == 1
    assert "staging to" in words[0]


def test_a_deleted_mirror_goes_on_and_says_so(tmp_path: Path, packed: PackedSet) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        source = nodes.source(0, NoShared())
        shutil.rmtree(nodes.agents[0].node.mirrors[0].path)
        nodes.deal()
        nodes.join()
        nodes.agents[0].node.look_around()
        nodes.agents[0].node.look_around()
        assert same(everything(packed, source), expected)
        words = nodes.words(0)
    assert len(words) == 1
    assert "deleted" in words[0]


def test_a_quota_below_the_set_keeps_what_is_used_soonest(tmp_path: Path, packed: PackedSet) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd"], quota_bytes=12_000) as nodes:
        assert nodes.stored.num_bytes > 20_000
        nodes.deal()
        source = nodes.source(0, NoShared())
        assert same(everything(packed, source), expected)
        assert same(everything(packed, source), expected)
        mirror = nodes.agents[0].node.mirrors[0]
        assert 6_000 < mirror.present_bytes <= 12_000
        assert nodes.counter("shared_bytes")[0] < 2 * nodes.stored.num_bytes, "some of it was still there"


def test_what_is_used_soonest_lies_in_the_fastest_tier(tmp_path: Path, packed: PackedSet) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "fast"], quota_bytes=6_000, slow_folder=tmp_path / "slow") as nodes:
        deal = nodes.deal()
        nodes.join()
        fast, slow = nodes.agents[0].node.mirrors
        sizes = nodes.stored.sizes
        in_fast, in_slow = (mirror.present() & (sizes > 0) for mirror in (fast, slow))
        assert not (in_fast & in_slow).any()
        assert (in_fast | in_slow)[sizes > 0].all()
        assert fast.present_bytes > 5_000
        assert np.median(deal.first_steps[in_fast]) < np.median(deal.first_steps[in_slow])
        assert same(everything(packed, nodes.source(0, NoShared())), expected)
        # the next epoch uses them in another order
        never = np.full(nodes.stored.num_slots, NEVER)
        keeper = nodes.agents[0].node.keeper
        nodes.agents[0].node.tiers.expect(
            Uses(np.zeros(len(never), np.int32), np.arange(len(never))[::-1].copy(), never)
        )
        last = int(np.flatnonzero(in_slow)[-1])
        slow.forget(last)
        assert keeper.stage([last])
        assert fast.has(last), "it is used first now"
        assert not (fast.present() & slow.present() & (sizes > 0)).any()
        assert (fast.present() | slow.present()).all(), "what made way went down"
        assert same(everything(packed, nodes.source(0, NoShared())), expected)


def test_copies_never_push_out_what_the_node_owns(tmp_path: Path, packed: PackedSet) -> None:
    """Else owned chunks are read from the shared filesystem once more."""
    folders = [tmp_path / f"ssd{node}" for node in range(2)]
    with Nodes(packed, folders, replicas=2) as nodes:
        num_bytes = nodes.stored.num_bytes
    shutil.rmtree(tmp_path / "ssd0")
    shutil.rmtree(tmp_path / "ssd1")
    with Nodes(packed, folders, replicas=2, quota_bytes=num_bytes * 3 // 4) as nodes:
        deal = nodes.deal("node_local")
        nodes.join()
        for node, agent in enumerate(nodes.agents):
            present = agent.node.tiers.present()
            assert present[deal.owners == node].all()
            assert present[(deal.owners != node) & (nodes.stored.sizes > 0)].any(), (
                "and copies where there is room"
            )
        assert sum(nodes.counter("shared_bytes")) == num_bytes


def test_what_a_node_gave_up_comes_back_from_a_copy(tmp_path: Path, packed: PackedSet) -> None:
    with Nodes(packed, [tmp_path / f"ssd{node}" for node in range(2)], replicas=2) as nodes:
        deal = nodes.deal()
        nodes.join()
        unlink_shared(packed)
        slot = int(np.flatnonzero((deal.owners == 0) & (nodes.stored.sizes > 8))[0])
        assert nodes.agents[0].node.mirrors[0].evict(slot)
        nodes.agents[0].node.keeper.get(slot)
        assert sum(nodes.counter("shared_bytes")) == nodes.stored.num_bytes


def test_a_mirror_with_nothing_to_give_up_is_not_looked_through_for_each_chunk(
    tmp_path: Path, packed: PackedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.staging.tiers._AT_ONCE", 2)
    with Nodes(packed, [tmp_path / "ssd"], quota_bytes=12_000) as nodes:
        nodes.deal()
        nodes.join()
        keeper, mirror = nodes.agents[0].node.keeper, nodes.agents[0].node.mirrors[0]
        steps = np.zeros(nodes.stored.num_slots, np.int64)
        nodes.agents[0].node.tiers.expect(Uses(np.zeros(len(steps), np.int32), steps, steps))
        looks = []
        present = mirror.present
        monkeypatch.setattr(mirror, "present", lambda: looks.append(1) or present())
        absent = np.flatnonzero(~present()).tolist()
        for slot in absent:
            keeper.get(slot)
        assert 0 < len(looks) < len(absent) // 2


@pytest.mark.parametrize("method", ["has", "present", "evict", "room_bytes", "is_deleted"])
def test_a_disk_that_fails_anyhow_is_done_without(
    method: str, tmp_path: Path, packed: PackedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mock: a disk that fails just there cannot be had."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd"], quota_bytes=12_000) as nodes:
        monkeypatch.setattr(nodes.agents[0].node.mirrors[0], method, fail)
        nodes.deal()
        source = nodes.source(0, NoShared())
        for _ in range(2):
            assert same(everything(packed, source), expected)
        nodes.join()
        nodes.agents[0].node.look_around()
        assert nodes.agents[0].node.status()["done"]
        (words,) = nodes.words(0)
        assert "Input/output error" in words
        assert nodes.warnings == []


def test_an_agent_that_fails_is_done_without(tmp_path: Path, packed: PackedSet) -> None:
    def fail(request: object) -> Reply:
        raise RuntimeError("a defect")

    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        nodes.agents[0]._server._answer = fail
        assert same(everything(packed, nodes.source(0)), expected)
        (words,) = nodes.warnings
        assert "a defect" in words


def test_a_dead_agent_costs_one_warning(tmp_path: Path, packed: PackedSet) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        source = nodes.source(0)
        nodes.agents[0]._server.close()
        assert same(everything(packed, source), expected)
        assert same(everything(packed, source), expected)
        assert len(nodes.warnings) == 1
        assert "does not answer" in nodes.warnings[0]
        assert source.counters.shared_bytes >= 2 * nodes.stored.num_bytes


def test_a_node_without_a_disk_owns_nothing_and_reads_from_the_others(
    tmp_path: Path, packed: PackedSet
) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd0", None]) as nodes:
        deal = nodes.deal()
        assert set(deal.owners.tolist()) == {0}
        assert same(everything(packed, nodes.source(1, NoShared())), expected)
        nodes.join()
        assert nodes.counter("shared_bytes") == [nodes.stored.num_bytes, 0]


class Liar:
    """Answers in the place of an agent."""

    def __init__(self, nodes: Nodes, node: int) -> None:
        self.true_answer = nodes.agents[node].answer
        nodes.agents[node]._server._answer = self

    def __call__(self, request):
        reply = self.true_answer(request)
        body = bytearray(reply.body)
        if body:
            body[len(body) // 2] ^= 1
        return Reply(reply.status, reply.digest, body=bytes(body))


def test_a_peer_that_lies_is_not_believed(tmp_path: Path, packed: PackedSet) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd0", tmp_path / "ssd1"]) as nodes:
        Liar(nodes, 0)
        nodes.deal()
        assert same(everything(packed, nodes.source(1, NoShared())), expected)
        words = nodes.words(1)
        assert len(words) == 1
        assert "wrong bytes" in words[0]


def test_a_peer_that_is_gone_is_done_without(tmp_path: Path, packed: PackedSet) -> None:
    expected = read_shared(packed)
    with Nodes(packed, [tmp_path / "ssd0", tmp_path / "ssd1"]) as nodes:
        nodes.deal()
        nodes.join()
        nodes.agents[0]._server.close()
        assert same(everything(packed, nodes.source(1, NoShared())), expected)
        words = nodes.words(1)
        assert len(words) == 1
        assert "does not answer" in words[0]


def test_two_jobs_on_a_node_share_what_is_there_and_the_second_takes_over(
    tmp_path: Path, packed: PackedSet
) -> None:
    expected = read_shared(packed)
    first = Nodes(packed, [tmp_path / "ssd"])
    with first, Nodes(packed, [tmp_path / "ssd"]) as second:
        first.deal()
        first.join()
        second.deal()
        second.join()
        assert "another job" in second.words(0)[0]
        assert same(everything(packed, second.source(0, NoShared())), expected)
        assert second.counter("shared_bytes") == [0]
        assert second.counter("written_chunks") == [0]
        first.stack.close()
        wait_for(lambda: second.agents[0].node.is_writable, "the second job owns the mirror")


def test_a_mirror_taken_over_before_the_deal_is_staged_to(tmp_path: Path, packed: PackedSet) -> None:
    durable = threading.Event()
    with Nodes(packed, [tmp_path / "ssd"]) as first, Nodes(packed, [tmp_path / "ssd"]) as second:
        (mirror,) = second.agents[0].node.mirrors
        mirror.sync = lambda: durable.wait(10)  # a disk takes its time
        first.stack.close()
        second.agents[0].node.look_around()
        assert mirror.is_owner
        second.deal()
        durable.set()
        second.join()
        assert second.counter("shared_bytes") == [second.stored.num_bytes]


def test_a_mirror_of_older_files_is_told_of_when_it_is_taken_over(tmp_path: Path) -> None:
    packed = user_set(tmp_path / "shared")
    with Nodes(packed, [tmp_path / "ssd"]) as first:
        first.deal()
        first.join()
        os.utime(tmp_path / "shared" / "a.h5", ns=(1, 1))
        changed = open_files(sorted((tmp_path / "shared").glob("*.h5")), {"x": "/x", "y": "/y"})
        stored = dataclasses.replace(
            stored_chunks(changed, file_keys_of(changed)), identity=first.stored.identity
        )
        with Nodes(changed, [tmp_path / "ssd"], on_changed="stop", stored=stored) as second:
            first.stack.close()
            second.agents[0].node.look_around()
            assert any("have changed" in words for words in second.words(0))


def test_a_chunk_damaged_on_the_shared_filesystem_is_bad_source_data(
    tmp_path: Path, packed: PackedSet
) -> None:
    index = packed.shards[0].dense["image"]
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        before = index.path.stat()
        with index.path.open("r+b") as file:
            file.seek(int(index.offsets[1]))
            file.write(b"\xff\xff\xff")
        os.utime(index.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        nodes.deal()
        with pytest.raises(DataError, match=r"digest does not match.*verify"):
            nodes.source(0).read(index, 1)
        nodes.join()
        assert "damaged" in " ".join(nodes.words(0))


def test_a_shared_file_replaced_while_it_is_staged_ends_the_run_as_io(
    tmp_path: Path, packed: PackedSet
) -> None:
    index = packed.shards[0].dense["image"]
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        content = bytearray(index.path.read_bytes())
        content[int(index.offsets[1])] ^= 0xFF
        index.path.unlink()
        index.path.write_bytes(content)
        with pytest.raises(StorageError, match="changed since"):
            nodes.source(0).read(index, 1)


def test_a_truncated_shared_file_ends_the_run_as_io(tmp_path: Path, packed: PackedSet) -> None:
    index = packed.shards[0].dense["image"]
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        os.truncate(index.path, int(index.offsets[1]) + 5)
        with pytest.raises(StorageError, match="changed since"):
            nodes.source(0).read(index, 1)


def user_set(folder: Path) -> PackedSet:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    for name in "ab":
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=rng.normal(size=(60, 9)), chunks=(7, 4), compression="gzip")
            file.create_dataset("y", data=np.arange(60.0))
    return open_files(sorted(folder.glob("*.h5")), {"x": "/x", "y": "/y"})


def test_user_files_are_staged_with_digests_of_their_own(tmp_path: Path) -> None:
    packed = user_set(tmp_path / "shared")
    expected = read_shared(packed)
    folders = [tmp_path / "ssd0", tmp_path / "ssd1"]
    with Nodes(packed, folders) as nodes:
        deal = nodes.deal()
        nodes.join()
        for node in range(2):
            assert same(everything(packed, nodes.source(node, NoShared())), expected)
        assert sum(nodes.counter("shared_bytes")) == nodes.stored.num_bytes
        assert "digests" in nodes.words(0)[0]
        slot = int(np.flatnonzero((deal.owners == 0) & (nodes.stored.sizes > 8))[0])
        damage(nodes, 0, slot)
        assert same(everything(packed, nodes.source(0, NoShared())), expected)
        assert nodes.counter("damaged_chunks") == [1, 0]
    with Nodes(packed, folders) as nodes:
        nodes.deal()
        nodes.join()
        assert nodes.counter("shared_bytes") == [0, 0]


@pytest.mark.parametrize("policy", ["restage", "stop"])
def test_user_files_that_were_touched_since_they_were_staged(tmp_path: Path, policy: str) -> None:
    packed = user_set(tmp_path / "shared")
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        nodes.deal()
        nodes.join()
    os.utime(tmp_path / "shared" / "a.h5", ns=(1, 1))
    packed = open_files(sorted((tmp_path / "shared").glob("*.h5")), {"x": "/x", "y": "/y"})
    if policy == "stop":
        with pytest.raises(StorageError, match="changed"):
            Nodes(packed, [tmp_path / "ssd"], on_changed=policy)
        return
    with Nodes(packed, [tmp_path / "ssd"], on_changed=policy) as nodes:
        assert any("changed" in words for words in nodes.words(0))
        nodes.deal()
        nodes.join()
        assert nodes.counter("shared_bytes") == [nodes.stored.num_bytes]


def test_a_user_file_that_changes_during_the_run_ends_it_as_io(tmp_path: Path) -> None:
    packed = user_set(tmp_path / "shared")
    index = packed.shards[0].dense["x"]
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        os.utime(index.path, ns=(1, 1))
        with pytest.raises(StorageError, match="changed since"):
            nodes.source(0).read(index, 0)


class Vanishing(StagedSource):
    """Another thread finds out that the agent has gone just after this one has looked whether there is one."""

    _agent = property(lambda self: self.left.pop() if self.left else None, lambda self, agent: None)


class Gone:
    def call(self, *_: object) -> Reply:
        raise PeerFailure("it has gone")


def test_an_agent_that_goes_while_several_threads_ask_it(tmp_path: Path, packed: PackedSet) -> None:
    index = packed.shards[0].dense["image"]
    warnings: list[str] = []
    with FileSource() as files:
        source = Vanishing(files, Slots(packed), [], None, warnings.append)
        source.left = [Gone()]
        assert len(source.read(index, 0)) == index.sizes[0]
    assert len(warnings) == 1
