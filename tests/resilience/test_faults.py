from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.resilience import faults
from hpctrain.resilience.faults import InjectedFaultError, configure, fault_point, parse_rules


@pytest.fixture(autouse=True)
def no_rules_left() -> None:
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(faults.VARIABLE, raising=False)
        configure(0, 1)


def arm(monkeypatch: pytest.MonkeyPatch, text: str, rank: int = 0, attempt: int = 1) -> None:
    monkeypatch.setenv(faults.VARIABLE, text)
    configure(rank, attempt)


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    configure(0, 1)
    fault_point("step", 1)


def test_a_rule_fires_only_where_all_its_keys_match(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = "raise@step:rank=1,step=7,attempt=2"
    for rank, attempt, step, name in (
        (0, 2, 7, "step"),
        (1, 1, 7, "step"),
        (1, 2, 6, "step"),
        (1, 2, 7, "save"),
    ):
        arm(monkeypatch, rule, rank, attempt)
        fault_point(name, step)
    arm(monkeypatch, rule, 1, 2)
    with pytest.raises(InjectedFaultError, match="step"):
        fault_point("step", 7)


@given(st.integers(1, 20), st.integers(1, 25))
def test_nth_fires_once_at_the_nth_matching_passage(nth: int, passages: int) -> None:
    rule = parse_rules(f"raise@save:nth={nth}")[0]
    due = [rule.due("save", step) for step in range(passages)]
    assert due == [place + 1 == nth for place in range(passages)]


def test_passages_of_other_points_and_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "raise@save:nth=2,step=5")
    for name, step in (("load", 5), ("save", 4), ("save", 5), ("save", 6)):
        fault_point(name, step)
    with pytest.raises(InjectedFaultError):
        fault_point("save", 5)


def test_a_point_may_hold_a_star(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "raise@checkpoint.*")
    fault_point("staging.write")
    with pytest.raises(InjectedFaultError):
        fault_point("checkpoint.rename")


@pytest.mark.parametrize(("action", "number"), [("enospc", errno.ENOSPC), ("eio", errno.EIO)])
def test_disk_errors(monkeypatch: pytest.MonkeyPatch, action: str, number: int) -> None:
    arm(monkeypatch, f"{action}@staging.write")
    with pytest.raises(OSError, match="injected") as caught:
        fault_point("staging.write")
    assert caught.value.errno == number


def test_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "sleep@step:s=0.2")
    began_s = time.monotonic()
    fault_point("step")
    assert time.monotonic() - began_s >= 0.2


@pytest.mark.parametrize(
    ("action", "code"),
    [("kill", -signal.SIGKILL), ("term", -signal.SIGTERM), ("exit", 1)],
)
def test_what_ends_the_process(monkeypatch: pytest.MonkeyPatch, action: str, code: int) -> None:
    monkeypatch.setenv(faults.VARIABLE, f"{action}@step")
    program = "from hpctrain.resilience.faults import *; configure(0, 1); fault_point('step'); input()"
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == code


def test_several_rules() -> None:
    rules = parse_rules(" kill@step:rank=1,step=7 ; exit@save:code=9;; sleep@x:s=0.5 ")
    assert [(rule.action, rule.point) for rule in rules] == [
        ("kill", "step"),
        ("exit", "save"),
        ("sleep", "x"),
    ]
    assert (rules[0].rank, rules[0].step, rules[1].code, rules[2].s) == (1, 7, 9, 0.5)


@pytest.mark.parametrize(
    "text",
    ["kill", "kill@", "@step", "explode@step", "kill@step:rank", "kill@step:rank=one", "kill@step:when=3"],
)
def test_a_rule_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(ConfigError, match=faults.VARIABLE):
        arm(monkeypatch, text)
