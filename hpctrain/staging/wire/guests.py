"""Who is connected to a server, and who must go where there are too many.

Strangers, who have not proved themselves yet, are few, and a new one takes the place of the one who has been there
longest: connections that say nothing keep nobody out. Of those who are known, the one that has been idle longest makes
room; its client connects again when it has something to ask.
"""

from __future__ import annotations

import threading
from typing import Final

from hpctrain.staging.wire.channel import Channel

MAX_STRANGERS: Final = 64
MAX_KNOWN: Final = 1024


class Guests:
    """The channels of a server by what they are doing. Only channels that are in here are ever hung up from outside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Under its lock; the one that has been there longest comes first:
        self._strangers: dict[Channel, None] = {}
        self._idle: dict[Channel, None] = {}
        self._busy: dict[Channel, None] = {}
        self._closed = False

    def admit(self, channel: Channel) -> None:
        """A stranger comes. Raises `OSError` where the server is closed."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the server is closed")
            if len(self._strangers) >= MAX_STRANGERS:
                _send_away(self._strangers)
            self._strangers[channel] = None

    def rest(self, channel: Channel) -> bool:
        """It has proved itself, or was answered, and waits now; False: it is to go."""
        with self._lock:
            was_known = channel in self._busy
            if self._closed or not (was_known or channel in self._strangers):
                return False
            self._forget(channel)
            if not was_known and len(self._idle) + len(self._busy) >= MAX_KNOWN:
                if not self._idle:
                    return False
                _send_away(self._idle)
            self._idle[channel] = None
            return True

    def work(self, channel: Channel) -> bool:
        """It has asked something; False: it is to go."""
        with self._lock:
            if self._closed or channel not in self._idle:
                return False
            self._forget(channel)
            self._busy[channel] = None
            return True

    def leave(self, channel: Channel) -> None:
        """It is hung up on by its own thread after this."""
        with self._lock:
            self._forget(channel)

    def close(self) -> None:
        """Hang up on all."""
        with self._lock:
            self._closed = True
            for channel in [*self._strangers, *self._idle, *self._busy]:
                channel.hang_up()

    def _forget(self, channel: Channel) -> None:
        for kind in (self._strangers, self._idle, self._busy):
            kind.pop(channel, None)


def _send_away(kind: dict[Channel, None]) -> None:
    longest = next(iter(kind))
    del kind[longest]
    longest.hang_up()
