"""The agent as a process: how it begins, what it is told, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from hpctrain.errors import ConfigError, HangError
from hpctrain.h5.packed import PackedSet
from hpctrain.staging.network import Op, Status
from hpctrain.staging.owners import NEVER
from hpctrain.staging.process import AgentProcess
from hpctrain.staging.stored import StoredChunks, file_keys_of, stored_chunks
from hpctrain.staging.wire import Client, PeerFailure, Request
from tests.staging.nodes import wait_for
from tests.support import ROOT, small_set

SECRET = b"1" * 32


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    return small_set(tmp_path / "shared" / "set", 120, 12)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentProcess]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    started = AgentProcess()
    yield started
    started.close()


def load(agent: AgentProcess, stored: StoredChunks, folder: Path) -> dict:
    head, arrays = stored.to_message()
    request = {
        "do": "load",
        "rank": 0,
        "attempt": 1,
        "secret": SECRET.hex(),
        "places": [{"directory": str(folder), "quota_bytes": None}],
        "interface": "lo",
        "on_changed": "restage",
        "drop_pages": False,
        "stored": head,
    }
    return agent.ask(request, arrays)[0]


def deal(agent: AgentProcess, stored: StoredChunks) -> None:
    first_steps = np.arange(stored.num_slots)
    owners = np.zeros(stored.num_slots, np.int32)
    head = {"do": "deal", "node": 0, "addresses": [None], "num_nodes": 1, "replicas": 1}
    agent.ask(
        head, {"owners": owners, "first_steps": first_steps, "next_epoch": np.full_like(first_steps, NEVER)}
    )


def test_it_stages_what_it_is_told_and_answers(
    tmp_path: Path, packed: PackedSet, agent: AgentProcess
) -> None:
    stored = stored_chunks(packed, file_keys_of(packed))
    reply = load(agent, stored, tmp_path / "ssd")
    assert reply["is_writable"]
    client = Client("127.0.0.1", reply["port"], SECRET)
    assert client.call(Request(Op.SEND_KEPT, 0), 4096).status == Status.ABSENT
    deal(agent, stored)

    def is_there() -> bool:
        return client.call(Request(Op.SEND_KEPT, stored.num_slots - 1), 1 << 20).status == Status.BYTES

    wait_for(is_there, "the last chunk")
    assert client.call(Request(Op.HAVE, 0), 4096).status == Status.PRESENT
    refused = client.call(Request(Op.HAVE, stored.num_slots), 4096)
    assert (refused.status, b"no chunk" in bytes(refused.body)) == (Status.BAD_DATA, True)
    unknown = client.call(Request(99, 0), 4096)
    assert unknown.status >= Status.BAD_DATA, "an operation that it does not know is refused, and it goes on"
    assert client.call(Request(Op.HAVE, 0), 4096).status == Status.PRESENT
    client.close()


def test_a_stranger_is_told_nothing(tmp_path: Path, packed: PackedSet, agent: AgentProcess) -> None:
    reply = load(agent, stored_chunks(packed, file_keys_of(packed)), tmp_path / "ssd")
    with pytest.raises(PeerFailure):
        Client("127.0.0.1", reply["port"], b"2" * 32).call(Request(Op.HAVE, 0), 1 << 20)


def test_the_secret_is_in_no_command_line(tmp_path: Path, packed: PackedSet, agent: AgentProcess) -> None:
    load(agent, stored_chunks(packed, file_keys_of(packed)), tmp_path / "ssd")
    process = psutil.Process(agent.pid)
    assert SECRET.hex() not in " ".join(process.cmdline())
    assert SECRET.hex() not in str(process.environ())


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from hpctrain.staging.process import AgentProcess\n"
        "agent = AgentProcess()\n"
        "print(agent.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as rank:
        pid = int(rank.stdout.readline())
        wait_for(lambda: psutil.Process(pid).num_threads() >= 1, "the agent")
        rank.send_signal(signal.SIGKILL)
    wait_for(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "the agent's end"
    )


def test_signals_that_mean_the_ranks_do_not_end_it(
    tmp_path: Path, packed: PackedSet, agent: AgentProcess
) -> None:
    stored = stored_chunks(packed, file_keys_of(packed))
    load(agent, stored, tmp_path / "ssd")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
        os.kill(agent.pid, number)
    deal(agent, stored)


def test_a_directory_that_others_may_write_to_is_told_as_such(
    tmp_path: Path, packed: PackedSet, agent: AgentProcess
) -> None:
    private = tmp_path / "ssd" / f"hpctrain-{os.getuid()}"
    private.mkdir(parents=True)
    private.chmod(0o777)
    with pytest.raises(ConfigError, match="0777"):
        load(agent, stored_chunks(packed, file_keys_of(packed)), tmp_path / "ssd")


def test_an_agent_that_died_or_stopped_is_noticed(
    tmp_path: Path, packed: PackedSet, agent: AgentProcess
) -> None:
    stored = stored_chunks(packed, file_keys_of(packed))
    load(agent, stored, tmp_path / "ssd")
    os.kill(agent.pid, signal.SIGSTOP)
    with pytest.raises(HangError, match="did not answer"):
        agent.ask({"do": "uses"}, {"more": np.zeros(1 << 20)}, timeout_s=0.2)  # more than a pipe holds
    wait_for(lambda: psutil.Process(agent.pid).status() == "zombie", "the end of the agent that hung")
    with pytest.raises(ConnectionError):
        agent.ask({"do": "uses"}, {})
