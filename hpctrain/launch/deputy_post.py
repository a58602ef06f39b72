"""Keeps a deputy (`hpctrain.launch.deputy`) on another node of the job than the one with the batch script."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.launch.local import start_process
from hpctrain.launch.sweep import HELPER_OPTIONS, helper_environment, srun_command
from hpctrain.resilience.scratch import scratch_prefix

_AGAIN_S = 30.0
_DISMISS_S = 1.5
_REAP_S = 0.5


class DeputyPost:
    """The deputy of one run, if there is one.

    Args:
        python: what it runs under.
        environment: of the batch script.
    """

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._python, self._environment = python, environment
        self._here = environment.get("SLURMD_NODENAME", "")
        self._process: subprocess.Popen[bytes] | None = None
        self._node = ""
        self._posted_s = 0.0

    @property
    def pid(self) -> int | None:
        """Process id of its srun."""
        return None if self._process is None else self._process.pid

    def keep(self, run_dir: Path, nodes: Sequence[str]) -> None:
        """See to it that there is a deputy on one of `nodes`, those that can be trusted, other than this one.

        That its srun lives says nothing about a node that is lost. Where it ended on a node that can be trusted, the
        next node gets it, but not more often than every half minute. A srun that cannot be started is no deputy.
        """
        others = [node for node in nodes if node != self._here]
        if not self._here or not others:
            return
        if self._node in others:
            recent = time.monotonic() - self._posted_s < _AGAIN_S
            if recent or (self._process is not None and self._process.poll() is None):
                return
        place = others.index(self._node) if self._node in others else 0  # the last one first
        self.dismiss()
        self._node, self._posted_s = others[place - 1], time.monotonic()
        with contextlib.suppress(OSError):
            self._process = self._post(run_dir)

    def dismiss(self) -> None:
        """End it, within two seconds. A srun that is asked to end ends its job step first, if its node answers."""
        process, self._process, self._node = self._process, None, ""
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_DISMISS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)

    def _post(self, run_dir: Path) -> subprocess.Popen[bytes]:
        # Its last word goes to a file of the run, not through srun, which dies with this host.
        output = str(run_dir / "deputy.log").replace("%", "%%")
        how = [f"--job-name={scratch_prefix(run_dir)}deputy", "--open-mode=append", f"--output={output}"]
        program = [self._python, "-m", "hpctrain.launch.deputy", str(run_dir), self._here]
        command = [*srun_command([self._node], 1), *HELPER_OPTIONS, *how, *program]
        return start_process(command, helper_environment(self._environment), Path(os.devnull))
