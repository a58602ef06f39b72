"""Watches the supervisor from another node of the job: `python -m hpctrain.launch.deputy RUN_DIR BATCH_HOST`.

`--no-kill` lets a job outlive its nodes, the one with the batch script too: Slurm 22.05 then leaves an allocation
RUNNING in which nobody is in charge. So one small process on another node waits for that, and requeues the job. It asks
Slurm only while the supervisor's heartbeat stands still.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hpctrain.launch.slurm_job import SlurmJob, current_job
from hpctrain.resilience.attempts import read_json
from hpctrain.resilience.lease import HEARTBEAT_S

_SILENCE_S = 3 * HEARTBEAT_S
_POLL_S = 2.0


def watch(run_dir: Path, batch_host: str, job: SlurmJob) -> str:
    """Return, with one sentence, when this start of the job is over: ended, or requeued because its host is lost."""
    heard_s, heartbeat = time.monotonic(), None
    while True:
        owner = read_json(run_dir / "owner.json") or {}
        now = (owner.get("heartbeat"), owner.get("pid"))
        if now != heartbeat:
            heard_s, heartbeat = time.monotonic(), now
        elif time.monotonic() - heard_s > _SILENCE_S:
            if job.state() not in (None, "RUNNING"):
                return "the job has ended"
            nodes = job.nodes()
            if nodes is not None and batch_host not in nodes:
                note(run_dir, f"{batch_host}, where the supervisor ran, is no longer a node of job {job.id}")
                comeback = job.come_back()
                if comeback.successor:
                    job.cancel()  # or the successor would wait for an allocation in which nobody works
                return comeback.words
        time.sleep(_POLL_S)


def note(run_dir: Path, words: str) -> None:
    """Append a line to `deputy.log`: what srun would write for it is lost with the batch host."""
    with (run_dir / "deputy.log").open("a", encoding="utf-8") as stream:
        stream.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {os.uname().nodename}: {words}\n")


def main(arguments: list[str]) -> None:
    """Watch, and say why it ended."""
    job = current_job()
    if job is None:
        sys.exit("hpctrain.launch.deputy runs inside a Slurm job only")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # `scancel -s USR1 JOB` reaches all steps, and means the ranks
    run_dir = Path(arguments[0])
    job.keep_script(run_dir)
    note(run_dir, watch(run_dir, arguments[1], job))


if __name__ == "__main__":
    main(sys.argv[1:])
