"""Which address of this host other nodes reach it by."""

from __future__ import annotations

import ipaddress
import socket
import threading
from typing import Final

import psutil

from hpctrain.errors import ConfigError

_LOOPBACK: Final = "127.0.0.1"
_LOOK_UP_S: Final = 5.0


def interface_address(name: str | None) -> str:
    """The address of a network interface: IPv4 where it has one, else IPv6; never one that is valid on its link only.

    `name` None: the address of the host's name where an interface has it that is not loopback, else that of the first
    interface that is up and not loopback, else loopback. Raises `ConfigError`, naming those there are, for an interface
    that is not there or has no such address.
    """
    found = _addresses()
    if name is None:
        return _address_of_host(found)
    if name not in found:
        raise ConfigError(
            f"staging.interface = {name}: there is no such interface with an address on {socket.gethostname()}; "
            f"there are {', '.join(sorted(found)) or 'none'}"
        )
    return found[name][0]


def _address_of_host(found: dict[str, list[str]]) -> str:
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
    usable = [address for name in up for address in found.get(name, []) if not _is_loopback(address)]
    of_name = [address for address in _addresses_of_name() if address in usable]
    return next(iter([*of_name, *usable]), _LOOPBACK)


def _addresses() -> dict[str, list[str]]:
    """The addresses of each interface that has any, IPv4 first."""
    found: dict[str, list[str]] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for interface, addresses in psutil.net_if_addrs().items():
            for address in addresses:
                # One that needs a scope means nothing on another node; IPv4 has them, too, on ports for management.
                if address.family == family and not ipaddress.ip_address(address.address).is_link_local:
                    found.setdefault(interface, []).append(str(address.address))
    return found


def _addresses_of_name() -> list[str]:
    """Of the host's name, IPv4 first; none where that takes too long, which only a thread of its own can tell."""
    found: list[str] = []

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        except OSError:
            return
        found.extend(sorted({str(answer[4][0]) for answer in answers}, key=lambda address: ":" in address))

    thread = threading.Thread(target=look_up, name="look_up", daemon=True)
    thread.start()
    thread.join(_LOOK_UP_S)
    return list(found)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
