"""The address of an interface, on real ones: loopback, and those of a network namespace."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from hpctrain.errors import ConfigError
from hpctrain.staging import interface
from hpctrain.staging.interface import interface_address
from tests.support import ROOT

# In a host of its own: what `interface_address` gives, step by step, for a name, or None with a name of the host.
INSIDE = """
import json, socket, subprocess
from hpctrain.errors import ConfigError
from hpctrain.staging.interface import interface_address

def ip(words):
    subprocess.run(["ip", *words.split()], check=True)

def address(name, host="nowhere.invalid"):
    socket.sethostname(host)
    try:
        return interface_address(name)
    except ConfigError as error:
        return str(error)

ip("link set lo up")
found = {"alone": address(None)}
for number, addresses in enumerate([["169.254.7.7/16"], ["fd00::5/64"], ["10.1.2.3/24", "10.1.2.4/24", "fd00::6/64"]]):
    ip(f"link add x{number} type veth peer name y{number}")
    for one in addresses:
        ip(f"address add {one} dev x{number}" + (" nodad" if ":" in one else ""))
    ip(f"link set y{number} up")
    ip(f"link set x{number} up")
ip("link add off type veth peer name ffo")
ip("address add 10.9.9.9/24 dev off")
for name in ("lo", "x0", "x1", "x2", "off", "none"):
    found[name] = address(name)
found["first"] = address(None)
for host in ("10.1.2.4", "fd00::6", "127.0.0.1", "10.9.9.9", "10.77.77.77"):
    found[host] = address(None, host)
print(json.dumps(found))
"""


def test_loopback_and_names_that_are_wrong() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(
        ConfigError, match=r"staging.interface = ib7: there is no such interface .*; there are .*lo"
    ):
        interface_address("ib7")
    with pytest.raises(ConfigError, match=r"staging.interface = :"):
        interface_address("")


def test_one_can_listen_on_what_is_found() -> None:
    address = interface_address(None)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    socket.create_server((address, 0), family=family).close()


@pytest.mark.skipif(os.getuid() != 0, reason="network namespaces are root's")
@pytest.mark.skipif(
    not (shutil.which("ip") and shutil.which("unshare")), reason="iproute2 or unshare is missing"
)
def test_interfaces_of_a_host_of_its_own() -> None:
    done = subprocess.run(
        ["unshare", "--net", "--uts", sys.executable, "-c", INSIDE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "Operation not permitted" in done.stderr or "not supported" in done.stderr:
        pytest.skip(f"no network namespaces here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("x0").endswith("there are lo, off, x1, x2")  # an address of the link alone is none
    assert found.pop("none").endswith("there are lo, off, x1, x2")
    assert found == {
        "alone": "127.0.0.1",
        "lo": "127.0.0.1",
        "x1": "fd00::5",
        "x2": "10.1.2.3",
        "off": "10.9.9.9",  # asked for by name
        "first": "fd00::5",
        "10.1.2.4": "10.1.2.4",
        "fd00::6": "fd00::6",
        "127.0.0.1": "fd00::5",
        "10.9.9.9": "fd00::5",  # not up
        "10.77.77.77": "fd00::5",  # not of this host
    }


def test_a_name_service_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver of this host answers: one that does not is a mock."""
    monkeypatch.setattr(interface, "_LOOK_UP_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(0.5) or [])
    begin_s = time.monotonic()
    interface_address(None)
    assert time.monotonic() - begin_s < 0.45
