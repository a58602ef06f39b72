"""For all tests."""

from __future__ import annotations

import signal

# A run in the background inherits an ignored SIGINT, and every process that a test starts would inherit it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
