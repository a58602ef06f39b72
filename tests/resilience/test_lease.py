from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError, StorageError
from hpctrain.resilience.lease import Lease, Owner, boot_id
from tests.resilience.conftest import wait_until

HOLDER = """
import sys, time
from pathlib import Path
from hpctrain.resilience.lease import Lease
lease = Lease(Path(sys.argv[1]))
lease.acquire()
lease.beat(4)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "held\n"
        yield process
    process.kill()
    process.wait()


def test_a_live_owner_is_refused_by_name(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(ConfigError, match=rf"pid {holder.pid}, attempt 4.*kill {holder.pid}.*--dir"):
        Lease(tmp_path).acquire()
    holder.send_signal(signal.SIGSTOP)  # stopped is not dead
    with pytest.raises(ConfigError):
        Lease(tmp_path).acquire()


def test_a_killed_owner_is_taken_over_at_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    began_s = time.monotonic()
    with Lease(tmp_path) as lease:
        previous = lease.acquire()
        assert previous is not None
        assert (previous.pid, previous.attempt) == (holder.pid, 4)
    assert time.monotonic() - began_s < 1


def test_a_released_directory_has_no_owner(tmp_path: Path) -> None:
    for _ in range(2):
        with Lease(tmp_path) as lease:
            assert lease.acquire() is None
            assert (tmp_path / "owner.json").exists()
        assert not (tmp_path / "owner.json").exists()
    lease.release()


def test_two_leases_in_one_process(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        lease.acquire()
        with pytest.raises(ConfigError):
            Lease(tmp_path).acquire()


def put_owner(tmp_path: Path, heartbeat: int, boot: str = "another boot") -> None:
    owner = Owner("another-host", 77, boot, 2, heartbeat)
    temporary = tmp_path / "owner.tmp"
    temporary.write_text(json.dumps(asdict(owner)))
    temporary.replace(tmp_path / "owner.json")


def test_an_owner_on_another_host_is_alive_while_its_heart_beats(tmp_path: Path) -> None:
    put_owner(tmp_path, 1)
    beats = threading.Timer(0.3, put_owner, (tmp_path, 2))
    beats.start()
    with pytest.raises(ConfigError, match="host another-host, pid 77, attempt 2"):
        Lease(tmp_path, observe_s=5).acquire()
    beats.join()


def test_an_owner_on_another_host_whose_heart_stands_still_is_taken_over(tmp_path: Path) -> None:
    put_owner(tmp_path, 1)
    with Lease(tmp_path, observe_s=0.5) as lease:
        began_s = time.monotonic()
        previous = lease.acquire()
        assert previous is not None
        assert previous.host == "another-host"
        assert time.monotonic() - began_s >= 0.5


def test_an_owner_that_releases_while_it_is_observed(tmp_path: Path) -> None:
    put_owner(tmp_path, 1)
    release = threading.Timer(0.3, (tmp_path / "owner.json").unlink)
    release.start()
    with Lease(tmp_path, observe_s=20) as lease:
        began_s = time.monotonic()
        lease.acquire()
        assert time.monotonic() - began_s < 5
    release.join()


def test_after_a_refusal_the_lock_is_free(tmp_path: Path) -> None:
    put_owner(tmp_path, 1)
    beats = threading.Timer(0.2, put_owner, (tmp_path, 2))
    beats.start()
    with pytest.raises(ConfigError):
        Lease(tmp_path, observe_s=5).acquire()
    beats.join()
    with Lease(tmp_path, observe_s=0.3) as lease:
        assert lease.acquire() is not None


def test_beats_are_few_and_count_up(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        lease.acquire()
        for _ in range(100):
            lease.beat()
        assert json.loads((tmp_path / "owner.json").read_text())["heartbeat"] == 1
        lease.beat(3)
        found = json.loads((tmp_path / "owner.json").read_text())
        assert (found["heartbeat"], found["attempt"]) == (2, 3)


def test_damaged_owner_files_do_not_block(tmp_path: Path) -> None:
    for content in ("", "{", '{"host": "x"}'):
        (tmp_path / "owner.json").write_text(content)
        with Lease(tmp_path) as lease:
            assert lease.acquire() is None


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "owner.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"owner\.lock"):
        Lease(tmp_path).acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_the_boot_has_a_name() -> None:
    wait_until(lambda: boot_id() == boot_id() != "")
