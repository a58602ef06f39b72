from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import reader_client, reader_side
from benchmarks.reader_client import INSTALL, Client, SideError, present, started
from benchmarks.reader_data import DataSet, Reference, write_packed

VALUES = np.random.default_rng(0).integers(0, 9, (40, 50), dtype=np.uint8)


@pytest.fixture
def data(tmp_path: Path) -> DataSet:
    made = DataSet.of("pictures", tmp_path, VALUES, chunk_samples=8, batch=10, window=16, workers=(0,))
    write_packed(made, VALUES)
    return made


def test_a_side_in_its_own_process(data: DataSet) -> None:
    name = "blosc-lz4 in memory, pictures"
    with started(["codec"], [data.folder], data.folder) as (client,):
        assert len(client.ask({"do": "names"}, 30)["names"]) == 4
        assert client.ask({"do": "choose", "side": name, "seconds": 0.01}, 30)["samples"] == 40
        found = client.ask({"do": "check", "side": name}, 30)
        assert found == {"digest": Reference.of(VALUES).expected(40), "count": 40, "dtypes": ["uint8"]}
        rate = client.ask({"do": "measure", "side": name, "epoch": 1, "seconds": 0.01, "cold": False}, 30)
        assert rate["gb_per_s"] > 0
        with pytest.raises(SideError, match=r"no such side, pictures: check: KeyError"):
            client.ask({"do": "check", "side": "no such side, pictures"}, 30)
        process = psutil.Process(client._process.pid)
    assert not process.is_running()


def test_one_that_ends_is_named_with_its_last_words(data: DataSet, tmp_path: Path) -> None:
    with started(["no such family"], [data.folder], tmp_path) as (client,):
        with pytest.raises(SideError, match=r"no such family: names: its process ended: KeyError"):
            client.ask({"do": "names"}, 30)
        with pytest.raises(SideError, match=r"its process (is gone|ended)"):
            client.ask({"do": "names"}, 30)


def test_one_that_is_silent_is_given_up(data: DataSet, tmp_path: Path) -> None:
    with started(["codec"], [data.folder], tmp_path) as (client,):
        client.ask({"do": "names"}, 30)
        os.kill(client._process.pid, signal.SIGSTOP)
        begun_s = time.monotonic()
        with pytest.raises(SideError, match="codec: names: no answer in time"):
            client.ask({"do": "names"}, 0.1)
        with pytest.raises(SideError, match="its process is gone"):
            client.ask({"do": "names"}, 30)
        assert time.monotonic() - begun_s < 4  # it is not waited for


WITH_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print('{"pid": %d}' % child.pid, flush=True)
import time; time.sleep(60)
"""


def test_the_workers_of_a_side_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "side.py"
    script.write_text(WITH_A_CHILD, encoding="utf-8")
    # A peer that leaves a worker behind cannot be had without one installed, so a script stands in for its process.
    popen = reader_client.subprocess.Popen
    monkeypatch.setattr(
        reader_client.subprocess,
        "Popen",
        lambda command, **options: popen([sys.executable, str(script)], **options),
    )
    client = Client("codec", [], tmp_path / "log")
    worker = psutil.Process(client.ask({"do": "names"}, 30)["pid"])
    client.close(0.1)
    deadline_s = time.monotonic() + 10
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_peers_that_are_not_installed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    # Whether peers are installed is the environment's matter; here two of them must not be.
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("streaming", "zarr") else found(name)
    )
    families, absent = present()
    assert {"codec", "hpctrain", "h5py"} <= set(families)
    assert {"mosaicml": INSTALL, "zarr": INSTALL}.items() <= absent.items()
    assert set(families) | set(absent) == set(reader_side.FAMILIES)
    assert not set(families) & set(absent)
