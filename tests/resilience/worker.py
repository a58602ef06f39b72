"""A rank without MPI and torch, for tests of the supervisor: counts steps in lockstep with the others through files.

Run as `python worker.py RUN_DIR ATTEMPT` under mpirun. It commits a checkpoint every 5 steps, obeys HPCTRAIN_FAULTS
at the points `start` and `step`, leaves when signalled, and writes end records as a real rank does.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from hpctrain.observe.events import EventLog
from hpctrain.resilience import faults, watchdog
from hpctrain.resilience.exits import EndRecord, FailureClass, write_end_record
from hpctrain.resilience.signals import StopFlag, die_with_parent
from hpctrain.resilience.watchdog import Watchdog

NUM_STEPS = int(os.environ.get("WORKER_STEPS", "20"))
STEP_S = float(os.environ.get("WORKER_STEP_S", "0.01"))
HANG_S = float(os.environ.get("WORKER_HANG_S", "30"))
COMMITS = os.environ.get("WORKER_COMMITS", "yes") == "yes"
RANK = int(next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ))


class Worker:
    def __init__(self, run_dir: Path, attempt: int) -> None:
        die_with_parent()
        self.stop = StopFlag()
        self.stop.install()
        self.run_dir, self.attempt = run_dir, attempt
        self.directory = run_dir / "attempts" / f"a{attempt:04d}"
        identity = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        (self.directory / "ranks" / f"{RANK}.pid.json").write_text(identity)
        self.start = json.loads((self.directory / "start.json").read_text())
        self.events = EventLog(self.directory / "events" / f"rank-{RANK}.jsonl")
        watchdog._GRACE_S = 2.0  # peers start together here; on a loaded machine less is too short
        self.watchdog = Watchdog(self.directory, RANK, HANG_S, HANG_S)
        self.watchdog.start()

    def agree(self, step: int, flag: bool) -> bool:
        """Wait until every rank has come to `step`; True when one of them wants to leave."""
        mine = self.directory / f"{RANK}.at"
        temporary = mine.with_suffix(f".tmp{RANK}")
        temporary.write_text(json.dumps({**self._seen(RANK), str(step): flag}))
        temporary.replace(mine)
        self.watchdog.beat("reduce", step)
        while True:
            seen = [self._seen(rank).get(str(step)) for rank in range(self.start["num_ranks"])]
            if None not in seen:
                return any(seen)
            time.sleep(0.002)

    def _seen(self, rank: int) -> dict[str, bool]:
        path = self.directory / f"{rank}.at"
        return json.loads(path.read_text()) if path.exists() else {}

    def commit(self, step: int) -> None:
        if not COMMITS:
            return
        path = self.run_dir / "checkpoints" / f"step-{step:09d}-a{self.attempt:04d}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")

    def run(self) -> FailureClass:
        faults.configure(RANK, self.attempt)
        faults.fault_point("start")
        names = self.start["checkpoints"]
        step = int(re.sub(r"step-(\d+)-.*", r"\1", names[0])) if names else 0
        while step < NUM_STEPS:
            step += 1
            self.watchdog.beat("compute", step)
            time.sleep(STEP_S)
            faults.fault_point("step", step)
            leaving = self.agree(step, self.stop.requested)
            if RANK == 0:
                self.events.emit("step", step=step, steps_total=NUM_STEPS, loss=1.0 / step)
                if leaving or step % 5 == 0:
                    self.commit(step)
            if leaving and step < NUM_STEPS:
                return FailureClass.LEAVE
        if RANK == 0:
            (self.run_dir / "result.json").write_text(json.dumps({"steps": step}))
        return FailureClass.DONE

    def main(self) -> NoReturn:
        try:
            end = self.run()
        except Exception as error:  # noqa: BLE001 - a rank turns whatever comes into a record
            phase, step = self.watchdog.current
            record = EndRecord.of_error(RANK, error, step=step, phase=phase)
            write_end_record(self.directory, record)
            os._exit(record.code)
        phase, step = self.watchdog.current
        write_end_record(self.directory, EndRecord.now(RANK, end, step=step, phase=phase))
        self.agree(NUM_STEPS + 1, False)
        sys.exit(end.exit_code)


if __name__ == "__main__":
    Worker(Path(sys.argv[1]), int(sys.argv[2])).main()
