"""Faults on purpose: named points in the product where a test can kill, raise, hang or fill the disk.

`HPCTRAIN_FAULTS` holds rules separated by `;`, each `ACTION@POINT:KEY=VALUE,...`, for example

    kill@step:rank=1,step=7,attempt=1;raise@checkpoint.rename:nth=2;sleep@staging.read:s=0.5

Actions: `kill` (SIGKILL to this process), `term` (SIGTERM), `stop` (SIGSTOP), `raise` (`InjectedFaultError`),
`exit` (`os._exit(code)`), `hang` (sleep for ever), `sleep` (`s` seconds), `enospc`, `eio` (that `OSError`).
Keys, all optional: `rank`, `attempt`, `step` (each must match), `nth` (only the n-th matching passage of this
process, from 1), `s` (seconds), `code`. POINT may hold `*`. Without the variable a point costs one test.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.errors import ConfigError

VARIABLE = "HPCTRAIN_FAULTS"
_INTEGER_KEYS = ("rank", "attempt", "step", "nth", "code")


class InjectedFaultError(RuntimeError):
    """Raised by a `raise` rule: stands for any uncaught exception of the user's code or ours."""


@dataclass
class _Rule:
    action: str
    point: str
    rank: int | None = None
    attempt: int | None = None
    step: int | None = None
    nth: int | None = None
    s: float = 1.0
    code: int = 1
    passages: int = 0

    def due(self, name: str, step: int) -> bool:
        """Whether this passage of the point `name` fires the rule; counts matching passages."""
        if not fnmatch.fnmatchcase(name, self.point) or self.step not in (None, step):
            return False
        self.passages += 1
        return self.nth in (None, self.passages)


_rules: tuple[_Rule, ...] = ()
_lock = threading.Lock()  # points are passed by I/O threads too


def configure(rank: int, attempt: int) -> None:
    """Read `HPCTRAIN_FAULTS` and keep the rules that concern this rank and attempt.

    Raises:
        ConfigError: a rule does not follow the grammar.
    """
    global _rules
    rules = parse_rules(os.environ.get(VARIABLE, ""))
    _rules = tuple(rule for rule in rules if rule.rank in (None, rank) and rule.attempt in (None, attempt))


def fault_point(name: str, step: int = -1) -> None:
    """A place where a fault may be injected; does nothing unless a rule says so."""
    if not _rules:
        return
    with _lock:
        due = [rule for rule in _rules if rule.due(name, step)]
    for rule in due:
        _ACTIONS[rule.action](rule, name)


def parse_rules(text: str) -> list[_Rule]:
    """The rules of `text`; raises `ConfigError` naming the rule and what was expected."""
    return [_parse_rule(part.strip()) for part in text.split(";") if part.strip()]


def _parse_rule(text: str) -> _Rule:
    head, _, tail = text.partition(":")
    action, at, point = head.partition("@")
    if not at or not point or action not in _ACTIONS:
        actions = ", ".join(_ACTIONS)
        raise ConfigError(f"{VARIABLE}: {text!r} is not ACTION@POINT[:KEY=VALUE,...]; actions: {actions}")
    rule = _Rule(action, point)
    for pair in filter(None, tail.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or key not in (*_INTEGER_KEYS, "s"):
            keys = ", ".join((*_INTEGER_KEYS, "s"))
            raise ConfigError(f"{VARIABLE}: {pair!r} in {text!r}: write KEY=VALUE with a key of {keys}")
        try:
            setattr(rule, key, float(value) if key == "s" else int(value))
        except ValueError as error:
            raise ConfigError(f"{VARIABLE}: {pair!r} in {text!r}: {value!r} is not a number") from error
    return rule


def _signal(number: signal.Signals) -> Callable[[_Rule, str], None]:
    return lambda rule, name: os.kill(os.getpid(), number)


def _raise(rule: _Rule, name: str) -> None:
    raise InjectedFaultError(f"injected at {name!r} by {VARIABLE}")


def _os_error(number: int) -> Callable[[_Rule, str], None]:
    def fail(rule: _Rule, name: str) -> None:
        raise OSError(number, f"{os.strerror(number)} (injected at {name!r} by {VARIABLE})")

    return fail


def _hang(rule: _Rule, name: str) -> None:
    while True:
        time.sleep(3600.0)


_ACTIONS: dict[str, Callable[[_Rule, str], None]] = {
    "kill": _signal(signal.SIGKILL),
    "term": _signal(signal.SIGTERM),
    "stop": _signal(signal.SIGSTOP),
    "raise": _raise,
    "exit": lambda rule, name: os._exit(rule.code),
    "hang": _hang,
    "sleep": lambda rule, name: time.sleep(rule.s),
    "enospc": _os_error(errno.ENOSPC),
    "eio": _os_error(errno.EIO),
}
