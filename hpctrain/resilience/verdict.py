"""From the end records and the launcher's word to one verdict on an attempt: class, blame and reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hpctrain.resilience.exits import EndRecord, FailureClass, gravest
from hpctrain.resilience.words import LauncherWord

# Phases in which a rank waits for the others: its hang is a consequence, not the cause.
_WAITING = re.compile(
    r"exchange|reduce|barrier|lockstep|guard|agree|broadcast|gather|wait|synchron", re.IGNORECASE
)


@dataclass(frozen=True)
class Evidence:
    """What an attempt left behind.

    `records` are the end records by rank, `hosts` the hosts of the ranks that came as far as saying where they are,
    `last_step` the last step in the events (-1: none), `word` what the launcher says, `log` its log,
    `supervisor_says` why the supervisor killed the attempt, if it did, `lost_node` a node that failed under it, and
    `launcher_code` the launcher's exit code (negative: the signal that killed it; None: never started).
    """

    num_ranks: int
    records: dict[int, EndRecord]
    hosts: dict[int, str]
    last_step: int = -1
    word: LauncherWord | None = None
    log: str = ""
    supervisor_says: str | None = None
    lost_node: str | None = None
    launcher_code: int | None = None

    @property
    def note(self) -> str | None:
        """What befell the launcher itself, in words."""
        if self.supervisor_says is None and self.launcher_code is not None and self.launcher_code < 0:
            return f"the launcher itself was killed (signal {-self.launcher_code})"
        return self.supervisor_says

    @property
    def missing(self) -> list[int]:
        """Ranks without an end record."""
        return [rank for rank in range(self.num_ranks) if rank not in self.records]

    @property
    def when(self) -> str:
        """How far the attempt had come, in words."""
        return f"after step {self.last_step}" if self.last_step >= 0 else "before the first step"


@dataclass(frozen=True)
class Verdict:
    """Class, exit code, the rank and node to blame (None: not known) and one sentence."""

    failure: FailureClass
    code: int
    rank: int | None
    node: str | None
    reason: str


def judge(evidence: Evidence) -> Verdict:
    """The verdict on one attempt."""
    failure, record = gravest(evidence.records, evidence.num_ranks)
    if record is None:
        return _without_record(evidence)
    if failure is FailureClass.HANG:
        return _hung(evidence)
    if failure is FailureClass.DONE:
        return Verdict(failure, record.code, None, None, "finished")
    if failure is FailureClass.LEAVE:
        reason = f"all ranks saved their state and left {evidence.when}"
        return Verdict(failure, record.code, None, None, reason)
    if failure is FailureClass.PEER:
        reason = f"every rank lost another one {evidence.when}; none says why"
        return Verdict(failure, record.code, None, None, reason)
    return Verdict(failure, record.code, record.rank, record.host, f"rank {record.rank}: {describe(record)}")


def describe(record: EndRecord) -> str:
    """Exception, message, step and phase of an end record, on one line."""
    what = (
        ": ".join(part for part in (record.exception, record.message) if part) or f"exit code {record.code}"
    )
    return f"{what} (step {record.step}, phase {record.phase})"


def rank_summaries(records: dict[int, EndRecord], num_ranks: int) -> list[dict[str, Any]]:
    """One entry per rank for `end.json`; ranks without a record are class `killed`."""
    keys = ("rank", "failure", "code", "exception", "message", "step", "phase", "host", "pid", "ended_unix_s")
    return [
        {key: getattr(records[rank], key) for key in keys}
        if rank in records
        else {"rank": rank, "failure": FailureClass.KILLED, "code": None}
        for rank in range(num_ranks)
    ]


def _without_record(evidence: Evidence) -> Verdict:
    """Some ranks left no record: killed, exited on the quiet, or never started."""
    word, missing = evidence.word, evidence.missing
    if not evidence.hosts and not evidence.records and (word is None or word.signal_number is None):
        return _not_started(evidence)
    named = word is not None and word.rank in missing
    rank = word.rank if word is not None and named else missing[0] if len(missing) == 1 else None
    node = evidence.lost_node or (word.node if word is not None and named else None)
    if node is None and rank is not None:
        node = evidence.hosts.get(rank)
    who = f"rank {rank} was" if rank is not None else f"ranks {', '.join(map(str, missing))} were"
    note = f"; {evidence.note}" if evidence.note else ""
    failure, how = FailureClass.KILLED, " killed"
    if word is not None and word.signal_number is not None:
        how = f" killed (signal {word.signal_number})"
    elif word is not None and word.exit_code is not None and named:
        failure, who = FailureClass.OTHER, f"rank {rank}"
        how = f" exited with code {word.exit_code} and no end record"
    return Verdict(failure, failure.exit_code, rank, node, f"{who}{how} {evidence.when}{note}")


def _not_started(evidence: Evidence) -> Verdict:
    lines = [line.strip() for line in evidence.log.splitlines() if line.strip(" -\t")]
    quiet = f"the launcher ended with code {evidence.launcher_code} and said nothing"
    what = evidence.note or (lines[-1] if lines else quiet)
    other = FailureClass.OTHER
    return Verdict(other, other.exit_code, None, None, f"no rank started: {what}")


def _hung(evidence: Evidence) -> Verdict:
    """Blame the rank that did not wait for others: one without a last word, else the one furthest behind."""
    hung = [record for record in evidence.records.values() if record.failure is FailureClass.HANG]
    hang = FailureClass.HANG
    # A stopped process is woken when the launcher ends the job, and may still leave some other record: too late to
    # count. Who had said nothing when the first watchdog bit is the one that the others waited for.
    bitten_s = min(record.ended_unix_s for record in hung)
    late = [
        rank
        for rank, record in evidence.records.items()
        if record not in hung and record.ended_unix_s > bitten_s
    ]
    silent = [*evidence.missing, *late]
    if len(silent) == 1 and all(_WAITING.search(record.phase) for record in hung):
        rank, witness = silent[0], hung[0]
        reason = f"rank {rank} stopped without a word; rank {witness.rank} waited for it: {describe(witness)}"
        return Verdict(hang, hang.exit_code, rank, None, reason)
    first = min(hung, key=lambda item: (bool(_WAITING.search(item.phase)), item.step, item.ended_unix_s))
    return Verdict(hang, hang.exit_code, first.rank, first.host, f"rank {first.rank} hung: {describe(first)}")
