from __future__ import annotations

import json
from dataclasses import replace

from hpctrain.resilience.exits import EndRecord, FailureClass
from hpctrain.resilience.verdict import Evidence, judge, rank_summaries
from hpctrain.resilience.words import LauncherWord

HOSTS = {0: "node0", 1: "node1", 2: "node2"}


def record(rank: int, failure: str, phase: str = "compute", step: int = 7, message: str = "why") -> EndRecord:
    made = EndRecord.now(rank, FailureClass(failure), step=step, phase=phase, message=message)
    return replace(made, host=f"node{rank}", ended_unix_s=float(rank))


def evidence(*records: EndRecord, **more: object) -> Evidence:
    found = Evidence(num_ranks=3, records={item.rank: item for item in records}, hosts=HOSTS, last_step=6)
    return replace(found, **more)  # type: ignore[arg-type]


def test_done_only_when_all_are() -> None:
    assert judge(evidence(*(record(rank, "done") for rank in range(3)))).failure is FailureClass.DONE
    assert judge(evidence(record(0, "done"), record(1, "done"))).failure is FailureClass.KILLED
    assert (
        judge(evidence(record(0, "done"), record(1, "leave"), record(2, "done"))).failure
        is FailureClass.LEAVE
    )


def test_a_killed_rank_is_named_by_the_launcher() -> None:
    word = LauncherWord("quote", rank=1, node="node-017", signal_number=9)
    verdict = judge(evidence(word=word))
    assert (verdict.failure, verdict.code, verdict.rank, verdict.node) == (
        FailureClass.KILLED,
        72,
        1,
        "node-017",
    )
    assert verdict.reason == "rank 1 was killed (signal 9) after step 6"


def test_the_only_rank_without_a_record_is_blamed() -> None:
    verdict = judge(evidence(record(0, "peer"), record(2, "peer")))
    assert (verdict.failure, verdict.rank, verdict.node) == (FailureClass.KILLED, 1, "node1")
    assert verdict.reason == "rank 1 was killed after step 6"


def test_a_lost_node_is_blamed_though_no_rank_on_this_host_tells() -> None:
    verdict = judge(evidence(supervisor_says="node node2 failed", lost_node="node2"))
    assert (verdict.failure, verdict.node) == (FailureClass.KILLED, "node2")
    assert verdict.reason.endswith("after step 6; node node2 failed")


def test_nobody_is_blamed_where_nothing_tells() -> None:
    verdict = judge(evidence(last_step=-1, supervisor_says="all ranks ended and the launcher did not (10 s)"))
    assert verdict.rank is None
    assert verdict.reason.startswith("ranks 0, 1, 2 were killed before the first step; all ranks ended")


def test_a_killed_launcher_is_named() -> None:
    words = "the launcher itself was killed (signal 9)"
    assert judge(evidence(launcher_code=-9)).reason == f"ranks 0, 1, 2 were killed after step 6; {words}"
    assert judge(evidence(launcher_code=-9, hosts={})).reason == f"no rank started: {words}"
    assert "overdue" in judge(evidence(launcher_code=-9, supervisor_says="overdue")).reason


def test_a_quiet_exit_is_class_other() -> None:
    verdict = judge(evidence(word=LauncherWord("quote", rank=2, exit_code=1)))
    assert (verdict.failure, verdict.rank) == (FailureClass.OTHER, 2)
    assert verdict.reason == "rank 2 exited with code 1 and no end record after step 6"


def test_the_exit_code_of_a_rank_with_a_record_is_no_news() -> None:
    word = LauncherWord("quote", rank=0, exit_code=76)
    verdict = judge(evidence(record(0, "peer"), word=word))
    assert verdict.failure is FailureClass.KILLED
    assert verdict.reason == "ranks 1, 2 were killed after step 6"


def test_a_launch_that_failed_shows_the_last_line_of_the_log() -> None:
    verdict = judge(evidence(hosts={}, log="-----\nAll nodes which are allocated are filled.\n-----\n"))
    assert verdict.failure is FailureClass.OTHER
    assert verdict.reason == "no rank started: All nodes which are allocated are filled."
    assert "ended with code 213 and said nothing" in judge(evidence(hosts={}, launcher_code=213)).reason
    assert "out of processes" in judge(evidence(hosts={}, supervisor_says="out of processes")).reason


def test_an_exception_names_rank_step_and_phase() -> None:
    verdict = judge(evidence(record(1, "bug"), record(0, "peer"), record(2, "peer")))
    assert (verdict.failure, verdict.code, verdict.rank, verdict.node) == (FailureClass.BUG, 70, 1, "node1")
    assert verdict.reason == "rank 1: why (step 7, phase compute)"


def test_peers_alone_blame_nobody() -> None:
    verdict = judge(evidence(*(record(rank, "peer") for rank in range(3))))
    assert (verdict.failure, verdict.rank) == (FailureClass.PEER, None)


def test_a_hang_is_blamed_on_the_rank_that_did_not_wait() -> None:
    found = judge(
        evidence(record(0, "hang", "reduce"), record(1, "hang", "data"), record(2, "hang", "reduce"))
    )
    assert (found.failure, found.code, found.rank, found.node) == (FailureClass.HANG, 71, 1, "node1")


def test_a_hang_is_blamed_on_the_rank_furthest_behind() -> None:
    found = judge(evidence(record(0, "hang", step=8), record(1, "hang", step=8), record(2, "hang", step=7)))
    assert found.rank == 2


def test_a_stopped_rank_is_blamed_for_the_hang_of_the_others() -> None:
    found = judge(evidence(record(0, "hang", "exchange"), record(2, "hang", "reduce")))
    assert (found.failure, found.rank) == (FailureClass.HANG, 1)
    assert "stopped without a word" in found.reason


def test_a_stopped_rank_that_was_woken_at_the_end_is_blamed_too() -> None:
    """The launcher's SIGCONT and SIGTERM wake it, and it leaves in good order: after the others' watchdogs bit."""
    woken = replace(record(1, "leave", "reduce"), ended_unix_s=9.0)
    found = judge(evidence(record(0, "hang", "reduce"), woken, record(2, "hang", "reduce")))
    assert (found.failure, found.rank) == (FailureClass.HANG, 1)


def test_summaries_go_into_json_with_one_entry_per_rank() -> None:
    entries = json.loads(json.dumps(rank_summaries({1: record(1, "bug")}, 2)))
    assert entries[0] == {"rank": 0, "failure": "killed", "code": None}
    assert (entries[1]["failure"], entries[1]["step"], entries[1]["message"]) == ("bug", 7, "why")
    assert "traceback" not in entries[1]
