"""What launchers say about a rank that ended without its own last word."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path

# Open MPI 4 and 5 name the first rank only, in boxes wrapped anywhere: matched on text with single spaces.
_OPEN_MPI_SIGNAL = re.compile(
    r"noticed that process rank (?P<rank>\d+) with PID \d+ on node (?P<node>\S+) exited on "
    r"signal (?P<signal>\d+)(?: \([^)]*\))?"
)
_OPEN_MPI_CODE = re.compile(
    r"The first process to do so was: Process name: \[\S+?,(?P<rank>\d+)\] Exit code: (?P<code>\d+)"
)
# Hydra (MPICH) names the process, not the rank, and says in its last lines whether the number is a signal.
_HYDRA = re.compile(
    r"BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES = PID (?P<pid>\d+) RUNNING AT (?P<node>\S+) "
    r"= EXIT CODE: (?P<code>\d+)"
)
_HYDRA_SIGNAL = re.compile(
    r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: [^(]+\(signal (?P<signal>\d+)\)"
)


# "srun: error: n2: tasks 2,4-5: Exited with exit code 1", "srun: error: n1: task 0: Segmentation fault (core dumped)"
_SRUN_ENDED = re.compile(r"srun: error: (?P<node>[^\s:]+): tasks? (?P<rank>\d+)[\d,-]*: (?P<how>.+)")
_SRUN_CODE = re.compile(r"Exited with exit code (?P<code>\d+)")
_SRUN_NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
# srun words them with strsignal(3). Out Of Memory is its own word for a task that the kernel killed.
_SIGNAL_NUMBERS: dict[str, int] = {
    text: number for number in signal.valid_signals() if (text := signal.strsignal(number)) is not None
}


@dataclass(frozen=True)
class LauncherWord:
    """The launcher's sentence and what it names: rank, node, and the signal or exit code that ended it."""

    quote: str
    rank: int | None = None
    node: str | None = None
    signal_number: int | None = None
    exit_code: int | None = None


def mpirun_word(log: str, pids: dict[int, int]) -> LauncherWord | None:
    """What mpirun's log says about the first rank that ended badly, or None.

    Args:
        log: the log's text.
        pids: process ids by rank, for launchers that name only the process.
    """
    text = " ".join(log.split())
    if match := _OPEN_MPI_SIGNAL.search(text):
        return LauncherWord(match[0], int(match["rank"]), match["node"], signal_number=int(match["signal"]))
    if match := _OPEN_MPI_CODE.search(text):
        return LauncherWord(match[0], int(match["rank"]), exit_code=int(match["code"]))
    if match := _HYDRA.search(text):
        ranks = {pid: rank for rank, pid in pids.items()}
        word = LauncherWord(match[0], ranks.get(int(match["pid"])), match["node"])
        if by_signal := _HYDRA_SIGNAL.search(text):
            return replace(word, signal_number=int(by_signal["signal"]))
        return replace(word, exit_code=int(match["code"]))
    return None


def srun_word(log: str, pids: dict[int, int]) -> LauncherWord | None:
    """What srun's own messages say about the first task that ended badly, or None.

    Args:
        log: the messages; srun speaks of tasks in the order in which they end.
        pids: not needed: srun names ranks.
    """
    for line in log.splitlines():
        if match := _SRUN_ENDED.search(line):
            rank = int(match["rank"])
            node = None if "[" in match["node"] else match["node"]
            how = match["how"].strip().removesuffix(" (core dumped)")
            if code := _SRUN_CODE.fullmatch(how):
                return LauncherWord(line.strip(), rank, node, exit_code=int(code["code"]))
            return LauncherWord(
                line.strip(), rank, node, signal_number=_SIGNAL_NUMBERS.get(how, signal.SIGKILL)
            )
    return None


def srun_lost_nodes(log: str) -> list[str]:
    """Nodes of which srun says that they failed."""
    return _SRUN_NODE_FAILURE.findall(log)


def read_log(path: Path, max_bytes: int = 1 << 20) -> str:
    """The last `max_bytes` of a log as text; empty where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(path.stat().st_size - max_bytes, 0))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
