"""How a rank begins and ends: `python -m hpctrain.training RUN_DIR ATTEMPT`, as the launcher starts it.

It ends with a record (`hpctrain.resilience.exits`), whatever happens: finished, asked to leave, or an error. An error
on one rank aborts the job, because the others would wait for it for ever.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import NoReturn

from hpctrain.resilience import faults
from hpctrain.resilience.exits import FailureClass
from hpctrain.resilience.signals import die_with_parent
from hpctrain.training.attempt import RankAttempt


def main(arguments: list[str]) -> NoReturn:
    """Run one rank; exits with 0 after an orderly end, else with the code of its end record."""
    attempt = RankAttempt(Path(arguments[0]), int(arguments[1]))
    threading.excepthook = lambda args: attempt.abort(args.exc_value or RuntimeError("a thread failed"))
    try:
        die_with_parent()
        attempt.open()
        faults.configure(attempt.rank, attempt.number)
        faults.fault_point("start")
        # torch takes seconds to load: by now the rank can be asked to leave, is watched, and dies with its launcher
        from hpctrain.training.rank import run_rank

        finished = run_rank(attempt)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the rank ends with a record of it
        attempt.abort(error)
    attempt.leave_together(FailureClass.DONE if finished else FailureClass.LEAVE)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
