from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import Ended, Measurement, Observation, Repetitions, Values, measure, order
from hpctrain.errors import DataError

NAMES = ("base", "second", "third")


@dataclass
class Machine:
    """A clock that only measuring moves, and a log of what was measured."""

    costs_s: dict[str, float]
    now_s: float = 0.0
    calls: list[tuple[str, int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def settings(
        self, action: Callable[[str, int], None] | None = None
    ) -> dict[str, Callable[[int], Values]]:
        def one(name: str) -> Callable[[int], Values]:
            def call(round_number: int) -> Values:
                self.calls.append((name, round_number))
                if action is not None:
                    action(name, round_number)
                self.now_s += self.costs_s[name]
                return {"speed": 10.0 * round_number + len(name)}

            return call

        return {name: one(name) for name in self.costs_s}

    def measure(
        self, repetitions: Repetitions, action: Callable[[str, int], None] | None = None
    ) -> Measurement:
        return measure(self.settings(action), repetitions, self.said.append, lambda: self.now_s)


@given(st.integers(1, 7), st.integers(0, 40))
def test_every_round_has_every_setting_once(count: int, number: int) -> None:
    assert sorted(order(range(count), number)) == list(range(count))  # type: ignore[arg-type]


@given(st.integers(1, 7), st.integers(1, 12))
def test_a_steady_drift_weighs_on_all_settings_alike(count: int, double_rounds: int) -> None:
    names = [str(i) for i in range(count)]
    moments: dict[str, list[int]] = {name: [] for name in names}
    for number in range(2 * double_rounds):
        for position, name in enumerate(order(names, number)):
            moments[name].append(number * count + position)
    assert len({sum(found) for found in moments.values()}) == 1


def test_every_setting_comes_first_in_some_round() -> None:
    assert {order(NAMES, number)[0] for number in range(2 * len(NAMES))} == set(NAMES)


def test_rounds_are_interleaved_and_the_warm_up_is_dropped() -> None:
    machine = Machine(dict.fromkeys(NAMES, 1.0))
    done = machine.measure(Repetitions(rounds=3))
    warm, counted = machine.calls[:3], machine.calls[3:]
    assert warm == [(name, -1) for name in NAMES]
    assert counted == [(name, number) for number in range(3) for name in order(NAMES, number)]
    assert [(item.setting, item.round_number) for item in done.observations] == counted
    assert done.ended is Ended.COMPLETE
    assert done.values("base", "speed") == [4.0, 14.0, 24.0]
    assert {item.seconds for item in done.observations} == {1.0}


def test_warm_up_of_one_setting_only() -> None:
    machine = Machine(dict.fromkeys(NAMES, 1.0))
    machine.measure(Repetitions(rounds=1, warmup=("base",)))
    assert [name for name, number in machine.calls if number < 0] == ["base"]


def test_progress_says_round_setting_and_elapsed_time() -> None:
    machine = Machine(dict.fromkeys(NAMES, 2.0))
    machine.measure(Repetitions(rounds=1))
    assert machine.said[0].split() == ["0.0", "s", "warm-up:", "base"]
    assert machine.said[-1].split() == ["10.0", "s", "round", "1", "of", "1", "at", "most:", "third"]


@given(
    st.lists(st.floats(0.5, 20), min_size=1, max_size=5),
    st.integers(1, 6),
    st.floats(1, 200),
    st.booleans(),
)
def test_the_deadline_holds_and_n_is_what_was_measured(
    costs: list[float], rounds: int, deadline_s: float, warm_all: bool
) -> None:
    machine = Machine({str(i): cost for i, cost in enumerate(costs)})
    warmup = None if warm_all else ("0",)
    done = machine.measure(Repetitions(rounds, min_rounds=2, warmup=warmup, deadline_s=deadline_s))
    warm_s = sum(costs) if warm_all else costs[0]
    if warm_all:  # every cost is known, so that none is begun after the first round that cannot end in time
        # sums of floats in another order: equal up to rounding
        assert machine.now_s <= max(deadline_s, warm_s + sum(costs[: len(done.settings)])) + 1e-9
    assert done.settings + done.left_out == tuple(machine.costs_s)
    counts = [len(done.values(name, "speed")) for name in done.settings]
    assert max(counts) <= rounds
    assert max(counts) - min(counts) <= 1
    if done.ended is Ended.COMPLETE:
        assert counts == [rounds] * len(counts)


def test_settings_are_left_out_from_the_end_where_two_rounds_would_not_fit() -> None:
    machine = Machine(dict.fromkeys("abcdefgh", 10.0))
    done = machine.measure(Repetitions(rounds=6, min_rounds=2, warmup=("a",), deadline_s=110.0))
    assert done.settings == ("a", "b", "c", "d")  # 10 s warm-up, then 4 x 2 x 10 s x 1.15 = 92 s
    assert done.left_out == ("e", "f", "g", "h")
    assert [len(done.values(name, "speed")) for name in done.settings] == [2, 2, 2, 2]
    assert done.ended is Ended.TIME
    assert "left out for want of time: e, f, g, h" in machine.said


def test_a_round_beyond_the_least_is_not_begun_when_it_would_not_fit() -> None:
    machine = Machine(dict.fromkeys(NAMES, 10.0))
    done = machine.measure(Repetitions(rounds=9, min_rounds=1, deadline_s=115.0))
    # 30 s warm-up; a round takes 30 s and is reckoned with 34.5 s: begun at 30 and 60, not at 90
    assert [len(done.values(name, "speed")) for name in NAMES] == [2, 2, 2]
    assert done.ended is Ended.TIME


def test_the_baseline_and_one_other_stay_however_short_the_time() -> None:
    machine = Machine(dict.fromkeys(NAMES, 10.0))
    done = machine.measure(Repetitions(rounds=5, deadline_s=31.0))
    assert done.settings == ("base", "second")
    assert [len(done.values(name, "speed")) for name in done.settings] == [1, 1]
    assert done.ended is Ended.TIME


def test_the_first_round_is_measured_though_the_time_is_over_before_it() -> None:
    done = Machine(dict.fromkeys(NAMES, 10.0)).measure(Repetitions(rounds=5, deadline_s=-100.0))
    assert done.measured() == ["base", "second"]
    assert done.ended is Ended.TIME


def test_nothing_to_measure() -> None:
    done = Machine({}).measure(Repetitions(rounds=3))
    assert (done.baseline, done.measured(), done.values("", "speed")) == ("", [], [])


@pytest.mark.parametrize(
    ("error", "ended"), [(KeyboardInterrupt(), Ended.INTERRUPTED), (DataError("bad"), Ended.FAILED)]
)
@pytest.mark.parametrize(("at", "kept"), [(("third", -1), 0), (("base", 0), 0), (("second", 1), 4)])
def test_what_was_measured_survives_an_interruption(
    error: BaseException, ended: Ended, at: tuple[str, int], kept: int
) -> None:
    def action(name: str, round_number: int) -> None:
        if (name, round_number) == at:
            raise error

    machine = Machine(dict.fromkeys(NAMES, 1.0))
    done = machine.measure(Repetitions(rounds=4), action)
    assert done.ended is ended
    assert done.failure is (error if ended is Ended.FAILED else None)
    assert len(done.observations) == kept
    assert machine.calls[-1] == at


def test_a_bug_is_not_swallowed() -> None:
    def action(name: str, round_number: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Machine({"base": 1.0}).measure(Repetitions(rounds=1), action)


@given(st.dictionaries(st.tuples(st.sampled_from(NAMES), st.integers(0, 5)), st.floats(0.1, 100)))
def test_ratios_pair_the_values_of_one_round(found: dict[tuple[str, int], float]) -> None:
    observations = [
        Observation(name, number, {"speed": value}, 1.0) for (name, number), value in found.items()
    ]
    done = Measurement(NAMES, observations)
    rounds = [number for name, number in found if name == "third" and ("base", number) in found]
    expected = [found["third", number] / found["base", number] for number in rounds]
    assert done.ratios("third", "base", "speed") == expected
    assert done.measured() == [name for name in NAMES if any(key[0] == name for key in found)]


def test_drift_between_rounds_leaves_paired_ratios_alone() -> None:
    drift = [1.0, 0.5, 2.0, 0.1]
    observations = [
        Observation(name, number, {"speed": speed * drift[number]}, 1.0)
        for number in range(4)
        for name, speed in (("base", 100.0), ("second", 150.0))
    ]
    assert Measurement(NAMES, observations).ratios("second", "base", "speed") == pytest.approx([1.5] * 4)


def test_a_quantity_that_a_round_lacks_is_left_out_of_its_pairs() -> None:
    observations = [
        Observation("base", 0, {"speed": 2.0}, 1.0),
        Observation("second", 0, {}, 1.0),
        Observation("base", 1, {"speed": 4.0}, 1.0),
        Observation("second", 1, {"speed": 8.0}, 1.0),
    ]
    done = Measurement(NAMES, observations)
    assert done.values("second", "speed") == [8.0]
    assert done.pairs("second", "base", "speed") == [(8.0, 4.0)]
    assert done.pairs_by_round("second", "base", "speed") == {1: (8.0, 4.0)}
