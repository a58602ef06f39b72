"""Ranks in a Slurm job, with commands of the test's making in place of Slurm's (see `Commands`)."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config import RunConfig
from hpctrain.errors import ConfigError, HangError
from hpctrain.launch import deputy_post, slurm, slurm_ranks, sweep
from hpctrain.launch.hostlist import expand_counts, expand_nodes
from hpctrain.launch.mpi import Mpi
from hpctrain.launch.slurm import SlurmLauncher
from hpctrain.launch.slurm_job import SlurmJob
from hpctrain.launch.slurm_ranks import SlurmRanks
from hpctrain.resilience.attempts import (
    ATTEMPT_VARIABLE,
    StartRecord,
    attempt_dir,
    next_attempt,
    write_start,
)
from hpctrain.resilience.launching import Placement
from hpctrain.resilience.processes import RankProcess
from hpctrain.resilience.scratch import scratch_prefix
from tests.launch.conftest import Commands
from tests.resilience.conftest import make_config, wait_until

SYSTEM_PATH = os.environ["PATH"]


def config(**cluster: Any) -> RunConfig:
    return RunConfig.model_validate({**make_config().model_dump(), "cluster": cluster})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("gpu[1-3,07],login2", ["gpu1", "gpu2", "gpu3", "gpu07", "login2"]),
        ("rack1-n[001-003]x", ["rack1-n001x", "rack1-n002x", "rack1-n003x"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("b,a[2,1]", ["b", "a2", "a1"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["n[1-3", "n]1[", "n[a-b]", "n[1-2]m[3-4]", "n[]", "n[1-]", "n[1,,2]"])
def test_a_host_list_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read; names such as gpu\[1-3,07\]"):
        expand_nodes(text)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A part of a bracket, such as `3` or `07-11`, and the numbers in it."""
    width, first, count = draw(st.integers(1, 4)), draw(st.integers(0, 999)), draw(st.integers(1, 12))
    numbers = [str(number).zfill(width) for number in range(first, first + count)]
    return (numbers[0] if count == 1 else f"{numbers[0]}-{numbers[-1]}"), numbers


@st.composite
def host_list_items(draw: st.DrawFn) -> tuple[str, list[str]]:
    """An item of a host list, such as `rack1-n[001-004,9]x`, and its names."""
    words = st.text("abcxyz-.019", max_size=6)
    head, parts = (
        draw(st.sampled_from(["n", "gpu", "rack1-n"])) + draw(words),
        draw(st.lists(ranges(), max_size=3)),
    )
    tail = draw(words)
    if not parts:
        return f"{head}{tail}", [f"{head}{tail}"]
    text = ",".join(part for part, _ in parts)
    return f"{head}[{text}]{tail}", [f"{head}{number}{tail}" for _, numbers in parts for number in numbers]


@settings(deadline=None)
@given(st.lists(host_list_items(), max_size=5))
def test_host_lists_round_trip(items: list[tuple[str, list[str]]]) -> None:
    assert expand_nodes(",".join(text for text, _ in items)) == [name for _, names in items for name in names]


@given(st.lists(st.tuples(st.integers(1, 128), st.integers(1, 9)), max_size=6))
def test_counts_round_trip(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in groups)
    assert expand_counts(text) == [tasks for tasks, nodes in groups for _ in range(nodes)]


class Cluster:
    """A job on n1, n2 and n3, two tasks each, and a srun that runs its command here, once per node."""

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self.environment = {
            "PATH": f"{commands.folder}:{SYSTEM_PATH}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_TASKS_PER_NODE": "2(x3)",
            "SLURM_NTASKS": "6",
            "SLURM_CPUS_PER_TASK": "4",
        }
        self.believe("n1 mixed", "n2 mixed", "n3 mixed")
        commands.answer("scancel")
        self.answering("n1", "n2", "n3")

    def believe(self, *states: str) -> None:
        """What Slurm thinks of the nodes."""
        self.commands.squeue(N="n[1-3]\n", i="")
        self.commands.answer("sinfo", "\n".join(states) + "\n")

    def answering(self, *nodes: str, silent: str = "exit 1") -> None:
        """The nodes on which a step starts; one that asks for another does `silent`."""
        alive = "|".join(nodes) or "none"
        self.commands.script(
            "srun",
            f"""
            for word in "$@"; do case "$word" in --nodelist=*) nodes="${{word#*=}}";; esac; done
            while [ "${{1#--}}" != "$1" ]; do shift; done
            IFS=,
            for node in $nodes; do case "$node" in {alive}) ;; *) {silent};; esac; done
            for node in $nodes; do SLURMD_NODENAME="$node" "$@" || exit; done
            """,
        )

    def launcher(
        self, num_ranks: int | None = None, kind: str = "srun-pmix", **variables: str
    ) -> SlurmLauncher:
        environment = self.environment | variables
        return SlurmLauncher(SlurmJob(environment), kind, num_ranks, environment)

    def sweeps(self) -> list[str]:
        """The nodes of every step that was started."""
        words = [word for call in self.commands.calls("srun") for word in call]
        return [word.partition("=")[2] for word in words if word.startswith("--nodelist=")]


@pytest.fixture
def cluster(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", f"{commands.folder}:{SYSTEM_PATH}")  # the sweep needs grep and sed
    for name, value in {"_PATIENCE_S": 0.2, "_RETRY_S": 0.01, "_SETTLE_S": 0.1}.items():
        monkeypatch.setattr(slurm, name, value)
    for name, value in {"_SWEEP_TIMEOUT_S": 3.0, "_STRAGGLER_TIMEOUT_S": 0.5}.items():
        monkeypatch.setattr(sweep, name, value)
    return Cluster(commands)


def place(
    launcher: SlurmLauncher, tmp_path: Path, description: RunConfig, again: bool = False
) -> Placement | None:
    launcher.check(description)
    return launcher.place(tmp_path / "run", description, again=again)


def test_all_tasks_of_the_job_become_ranks(cluster: Cluster, tmp_path: Path) -> None:
    assert place(cluster.launcher(), tmp_path, config()) == Placement(("n1", "n2", "n3"), 6)
    assert cluster.sweeps() == [], "the first time nobody needs to be asked"


def test_fewer_ranks_take_fewer_nodes(cluster: Cluster, tmp_path: Path) -> None:
    assert place(cluster.launcher(3), tmp_path, config()) == Placement(("n1", "n2"), 3)


def test_uneven_nodes(cluster: Cluster, tmp_path: Path) -> None:
    launcher = cluster.launcher(SLURM_TASKS_PER_NODE="4,1(x2)")
    assert place(launcher, tmp_path, config()) == Placement(("n1", "n2", "n3"), 6)
    assert place(cluster.launcher(4, SLURM_TASKS_PER_NODE="4,1(x2)"), tmp_path, config()) == Placement(
        ("n1",), 4
    )


def test_a_spare_node_takes_the_place_of_a_lost_one(cluster: Cluster, tmp_path: Path) -> None:
    spare = config(spare_nodes=1)
    assert place(cluster.launcher(), tmp_path, spare) == Placement(("n1", "n2"), 4)
    cluster.answering("n1", "n3")
    assert place(cluster.launcher(), tmp_path, spare, again=True) == Placement(("n1", "n3"), 4, lost=("n2",))
    assert cluster.sweeps()[0] == "n1,n2,n3"
    assert sorted(cluster.sweeps()[1:]) == ["n1", "n2", "n3"], "then each by itself"


def began_on(run_dir: Path, *nodes: str) -> None:
    """An earlier attempt of the run, on these nodes."""
    number = next_attempt(run_dir)
    write_start(run_dir, StartRecord(number, 4, [], "task", "n1", 1, "boot", list(nodes), 0.0, "1"))


def test_the_node_that_is_left_keeps_its_place(cluster: Cluster, tmp_path: Path) -> None:
    """Its SSD has the chunks of its ranks."""
    began_on(tmp_path / "run", "n1", "n2")
    cluster.answering("n2", "n3")
    spare = config(spare_nodes=1)
    found = place(cluster.launcher(), tmp_path, spare, again=True)
    assert found == Placement(("n3", "n2"), 4, lost=("n1",))


def test_a_run_that_comes_back_keeps_its_places(cluster: Cluster, tmp_path: Path) -> None:
    """The queue may have given other nodes; of those that the run had, none is left aside."""
    began_on(tmp_path / "run", "n9", "n3")
    assert place(cluster.launcher(), tmp_path, config(spare_nodes=1)) == Placement(("n1", "n3"), 4)
    began_on(tmp_path / "run", "n3", "n1")
    assert place(cluster.launcher(), tmp_path, config()) == Placement(("n3", "n1", "n2"), 6)


def test_srun_is_told_the_node_of_each_rank_where_it_would_choose_another(
    cluster: Cluster, tmp_path: Path
) -> None:
    began_on(tmp_path / "run 100%t", "n3", "n9")
    words = Started(cluster, tmp_path, cluster.launcher(3), config()).words
    assert {"--nodes=2", "--nodelist=n3,n3,n1", "--ntasks=3", "--distribution=arbitrary"} <= set(words)


@pytest.mark.parametrize("option", ["--distribution=cyclic", "-mcyclic"])
def test_a_distribution_of_the_users_own_has_precedence(
    cluster: Cluster, tmp_path: Path, option: str
) -> None:
    began_on(tmp_path / "run 100%t", "n3", "n9")
    words = Started(cluster, tmp_path, cluster.launcher(3), config(srun_options=[option])).words
    assert {"--nodelist=n3,n1", option} <= set(words)
    assert "--distribution=arbitrary" not in words


def test_a_node_that_srun_saw_fail_is_not_asked(begin: Begin, cluster: Cluster, tmp_path: Path) -> None:
    """Slurm may list it for minutes; srun may have said it with its last breath, after the last look."""
    ranks = begin("echo 'srun: error: Node failure on n2' >&2")
    assert ranks.process.wait(20) == 0
    ranks.end()
    before = len(cluster.sweeps())
    cluster.answering("n1", "n3")
    began_s = time.monotonic()
    assert begin.launcher.place(tmp_path / "run", config(min_ranks=1), again=True) == Placement(
        ("n1",), 2, lost=("n2",)
    )
    assert cluster.sweeps()[before:] == ["n1,n3"]
    begin.launcher.clean(tmp_path / "run")
    assert cluster.sweeps()[before + 1 :] == ["n1,n3"], "nor does it hold the end of the run up"
    assert time.monotonic() - began_s < 5


def test_a_node_that_slurm_gave_up_is_not_even_asked(cluster: Cluster, tmp_path: Path) -> None:
    cluster.believe("n1 mixed", "n2 down*", "n3 mixed")
    found = place(cluster.launcher(), tmp_path, config(spare_nodes=1), again=True)
    assert found == Placement(("n1", "n3"), 4, lost=("n2",))
    assert cluster.sweeps() == ["n1,n3"]


def test_without_a_spare_node_there_is_nowhere(cluster: Cluster, tmp_path: Path) -> None:
    cluster.answering("n1", "n2")
    assert place(cluster.launcher(), tmp_path, config(), again=True) is None
    assert place(cluster.launcher(), tmp_path, config(spare_nodes=1), again=True) == Placement(
        ("n1", "n2"), 4, ("n3",)
    )


@pytest.mark.parametrize(("least", "found"), [(0, None), (4, 4), (5, None), (1, 4)])
def test_fewer_ranks_where_the_run_allows_it(
    cluster: Cluster, tmp_path: Path, least: int, found: int | None
) -> None:
    cluster.answering("n2", "n3")
    placed = place(cluster.launcher(), tmp_path, config(min_ranks=least), again=True)
    assert placed == (None if found is None else Placement(("n2", "n3"), found, lost=("n1",)))


def test_no_node_at_all(cluster: Cluster, tmp_path: Path) -> None:
    cluster.answering()
    assert place(cluster.launcher(), tmp_path, config(min_ranks=1), again=True) is None


def test_a_node_that_keeps_a_step_waiting_does_not_keep_the_others(cluster: Cluster, tmp_path: Path) -> None:
    cluster.answering("n1", "n3", silent="exec sleep 60")
    began_s = time.monotonic()
    found = place(cluster.launcher(), tmp_path, config(spare_nodes=1), again=True)
    assert found == Placement(("n1", "n3"), 4, lost=("n2",))
    assert time.monotonic() - began_s < 15


def test_a_slurm_that_does_not_answer_is_no_ground_to_stand_on(cluster: Cluster, tmp_path: Path) -> None:
    cluster.commands.answer("squeue", err="Unable to contact slurm controller\n", code=1)
    with pytest.raises(HangError, match="does not say which nodes job 7 has"):
        place(cluster.launcher(), tmp_path, config(), again=True)


@pytest.mark.parametrize(
    ("num_ranks", "spare"),
    [(7, 0), (5, 1), (None, 3), (None, 4), (1, 4)],
)
def test_ranks_that_do_not_fit_are_refused(cluster: Cluster, num_ranks: int | None, spare: int) -> None:
    with pytest.raises(ConfigError, match=rf"do not fit on 3 nodes.*spare_nodes = {spare}"):
        cluster.launcher(num_ranks).check(config(spare_nodes=spare))


def test_without_srun_it_is_said_what_to_load(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"launcher srun-pmi2: there is no srun on PATH in job 7"):
        cluster.launcher(kind="srun-pmi2", PATH="/nowhere").check(config())


def test_a_sweep_kills_what_is_left_of_the_run_and_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    """The very script that runs on the nodes, on this one."""
    run_dir = tmp_path / "run"
    environment = {"PATH": SYSTEM_PATH}
    ours, other = (
        subprocess.Popen(["sleep", "60"], env=environment | {ATTEMPT_VARIABLE: str(attempt_dir(path, 3))})
        for path in (run_dir, tmp_path / "run-2")
    )
    mine, foreign = (
        Path("/dev/shm") / f"{scratch_prefix(path)}a0003" for path in (run_dir, tmp_path / "run-2")
    )
    try:
        wait_until(lambda: b"HPCTRAIN" in Path(f"/proc/{other.pid}/environ").read_bytes())
        for path in (mine, foreign):
            path.mkdir()
        launcher = cluster.launcher()
        assert place(launcher, tmp_path, config(), again=True) == Placement(("n1", "n2", "n3"), 6)
        assert ours.wait(20) == -signal.SIGKILL
        assert other.poll() is None
        assert not mine.exists()
        assert foreign.exists()
        mine.mkdir()
        launcher.clean(run_dir)
        assert not mine.exists()
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()
        for path in (mine, foreign):
            if path.exists():
                path.rmdir()


class Started:
    """What a launched srun was given."""

    def __init__(
        self, cluster: Cluster, tmp_path: Path, launcher: SlurmLauncher, description: RunConfig
    ) -> None:
        # a `%` in the path must not be taken for one of srun's own
        self.run_dir = tmp_path / "run 100%t"
        attempt = next_attempt(self.run_dir)
        variables = shlex.quote(str(cluster.commands.folder / "environment"))
        cluster.commands.script("srun", f"env > {variables}; echo said by srun")
        launcher.check(description)
        placement = launcher.place(self.run_dir, description, again=False)
        assert placement is not None
        ranks = launcher.start(self.run_dir, attempt, placement, description)
        assert ranks.process.wait(20) == 0
        ranks.end()
        (self.words,) = cluster.commands.calls("srun")
        lines = (cluster.commands.folder / "environment").read_text().splitlines()
        self.environment = dict(line.split("=", 1) for line in lines if "=" in line)
        self.said = launcher.log(self.run_dir, attempt).read_text()


def test_what_srun_is_told(cluster: Cluster, tmp_path: Path) -> None:
    description = config(
        spare_nodes=1, srun_options=["--cpu-bind=none"], container=["apptainer", "exec", "my image"]
    )
    started = Started(cluster, tmp_path, cluster.launcher(), description)
    end = started.words.index("apptainer")
    assert set(started.words[:end]) >= {
        "--no-kill", "--export=ALL", "--nodes=2", "--nodelist=n1,n2", "--ntasks=4",
        f"--job-name={scratch_prefix(started.run_dir)}a0001",
        "--mpi=pmix", "--kill-on-bad-exit=1", "--cpus-per-task=4", "--open-mode=append", "--cpu-bind=none",
    }  # fmt: skip
    directory = attempt_dir(started.run_dir, 1)
    assert f"--output={tmp_path}/run 100%%t/attempts/a0001/logs/rank-%t.log" in started.words
    assert not any(word.startswith("--distribution") for word in started.words), "nobody asked for an order"
    program = [
        "apptainer",
        "exec",
        "my image",
        sys.executable,
        "-m",
        "hpctrain.training",
        str(started.run_dir),
        "1",
    ]
    assert started.words[end:] == program
    assert started.said == "said by srun\n"
    assert started.environment[ATTEMPT_VARIABLE] == str(directory)
    assert started.environment["HPCTRAIN_SCRATCH"] == scratch_prefix(started.run_dir)
    assert "SLURM_NTASKS" not in started.environment
    assert started.environment["SLURM_CPUS_PER_TASK"] == "4", "what each rank is to have stays"
    assert started.environment["SLURM_JOB_ID"] == "7"


def test_the_environment_of_the_batch_script_has_a_say(cluster: Cluster, tmp_path: Path) -> None:
    launcher = cluster.launcher(
        kind="srun-pmi2",
        HPCTRAIN_PYTHON="/ssd/env/bin/python",
        HPCTRAIN_CONTAINER="podman-hpc run 'my image'",
    )
    started = Started(cluster, tmp_path, launcher, config(container=["apptainer"]))
    assert "--mpi=pmi2" in started.words
    program = started.words[started.words.index("podman-hpc") :]
    assert program[:5] == ["podman-hpc", "run", "my image", "/ssd/env/bin/python", "-m"]


class Begin:
    """Starts ranks on two nodes; srun is the given sh script."""

    def __init__(self, cluster: Cluster, run_dir: Path) -> None:
        self.cluster, self.run_dir = cluster, run_dir
        self.launcher = cluster.launcher(2)

    def __call__(self, body: str, **variables: str) -> SlurmRanks:
        attempt = next_attempt(self.run_dir)
        self.cluster.commands.script("srun", body)
        if variables:
            self.launcher = self.cluster.launcher(2, **variables)
        self.launcher.check(config())
        return self.launcher.start(self.run_dir, attempt, Placement(("n1", "n2"), 2), config())


@pytest.fixture
def begin(cluster: Cluster, tmp_path: Path) -> Begin:
    return Begin(cluster, tmp_path / "run")


def test_ranks_are_asked_to_leave_once_all_can_take_it(begin: Begin, tmp_path: Path) -> None:
    """srun passes SIGUSR1 on; a rank without its handler would die of it."""
    ready = shlex.quote(str(tmp_path / "ready"))
    ranks = begin(f"trap 'echo warned' USR1\n: > {ready}\nfor i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.25; done")
    log = attempt_dir(tmp_path / "run", 1) / "logs" / "srun.log"
    folder = attempt_dir(tmp_path / "run", 1) / "ranks"
    wait_until((tmp_path / "ready").exists)
    (folder / "0.pid.json").write_text('{"host": "n1", "pid": 1}')
    ranks.ask_to_leave()
    time.sleep(0.3)
    assert log.read_text() == ""
    (folder / "1.pid.json").write_text('{"host": "n2", "pid": 1}')
    for _ in range(3):
        ranks.ask_to_leave()
        time.sleep(0.4)  # signals that wait for each other become one
    assert ranks.process.wait(20) == 0
    ranks.ask_to_leave()  # too late: no error
    ranks.end()
    assert log.read_text() == "warned\n"


def test_a_node_failure_is_read_off_the_log(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_ranks, "_LOOK_S", 0.0)
    ranks = begin("echo 'srun: error: Node failure on n2' >&2; exec sleep 60")
    try:
        wait_until(ranks.lost_node)
        assert ranks.lost_node() == "n2"
    finally:
        ranks.end()
    assert ranks.process.wait(20) == -signal.SIGKILL


def test_ending_kills_the_job_step_and_srun(
    begin: Begin, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the step of another attempt, nor that of another run in the same job."""
    monkeypatch.setattr(slurm, "_END_TIMEOUT_S", 0.2)
    ranks = begin("exec sleep 60")
    own, other = scratch_prefix(tmp_path / "run"), scratch_prefix(tmp_path / "other")
    cluster.commands.squeue(i=f"7.0 {own}a0001\n7.1 {own}a0002\n7.2 {other}a0001\n")
    ranks.end()
    assert ranks.process.wait(20) == -signal.SIGKILL
    assert {call[-1] for call in cluster.commands.calls("scancel")} == {"7.0"}


def test_the_launchers_words_are_those_of_its_kind(cluster: Cluster, tmp_path: Path) -> None:
    srun, mpirun = cluster.launcher(), cluster.launcher(kind="mpirun")
    word = srun.word("srun: error: n2: task 1: Killed\n", {})
    assert word is not None
    assert (word.rank, word.node) == (1, "n2")
    assert mpirun.word("srun: error: n2: task 1: Killed\n", {}) is None
    assert (srun.log(tmp_path, 1).name, mpirun.log(tmp_path, 1).name) == ("srun.log", "mpirun.log")


def test_only_steps_that_mpirun_has_started_itself_are_ended(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program of the user may run under another mpirun in the same job."""
    monkeypatch.setattr(slurm, "_END_TIMEOUT_S", 0.3)
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\nexec sleep 60\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(slurm, "find_mpi", lambda: Mpi(mpirun, "Open MPI", "5.0"))
    launcher = cluster.launcher(2, kind="mpirun")
    launcher.check(config())
    cluster.commands.squeue(i="7.0 prted\n7.1 bash\n")
    run_dir = tmp_path / "run"
    ranks = launcher.start(run_dir, next_attempt(run_dir), Placement(("n1",), 2), config())
    assert len(cluster.commands.calls("squeue")) == 1 + 1, "one more than SlurmJob asks when it is made"
    cluster.commands.squeue(i="7.0 prted\n7.1 bash\n7.2 prted\n7.3 bash\n")
    ranks.end()
    assert ranks.process.wait(20) == -signal.SIGKILL
    assert {call[-1] for call in cluster.commands.calls("scancel")} == {"7.2"}
    assert all(len(call) == 3 for call in cluster.commands.calls("scancel"))


def test_without_srun_a_finished_run_ends_in_peace(cluster: Cluster, tmp_path: Path) -> None:
    """mpirun can do without it: `check` does not ask for it."""
    launcher = cluster.launcher(kind="mpirun", SLURMD_NODENAME="n1", PATH="/nowhere")
    launcher.check(config())
    (cluster.commands.folder / "srun").unlink()
    launcher.clean(tmp_path / "run")
    assert launcher.place(tmp_path / "run", config(), again=True) is None


def test_files_that_cannot_be_listed_now_do_not_end_the_supervisor(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> dict[int, RankProcess]:  # no filesystem here gives ESTALE on demand
        raise OSError(errno.ESTALE, "Stale file handle")

    ranks = begin("exec sleep 60")
    monkeypatch.setattr(slurm_ranks, "started_ranks", stale)
    ranks.ask_to_leave()
    ranks.end()
    assert ranks.process.wait(20) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({"SLURM_GPUS": "12", "SLURM_GPUS_ON_NODE": "4"}, ["--gpus-per-node=4"]),
        ({"SLURM_GPUS": "a100:12", "SLURM_GPUS_ON_NODE": "4"}, ["--gpus-per-node=4"]),
        ({"SLURM_GPUS": "11", "SLURM_GPUS_ON_NODE": "4"}, []),
        ({"SLURM_GPUS": "12", "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "2"}, []),
        ({"SLURM_GPUS": "12"}, []),
        ({"SLURM_GPUS_ON_NODE": "4"}, []),
    ],
)
def test_a_step_says_its_gpus_where_the_job_said_only_their_sum(
    cluster: Cluster, tmp_path: Path, variables: dict[str, str], options: list[str]
) -> None:
    launcher = cluster.launcher(**variables)
    launcher.check(config())
    run_dir = tmp_path / "run"
    ranks = launcher.start(run_dir, next_attempt(run_dir), Placement(("n1", "n2"), 2), config())
    ranks.process.wait(20)
    ranks.end()
    (words,) = cluster.commands.calls("srun")
    assert [word for word in words if word.startswith("--gpu")] == options


def test_a_deputy_on_a_node_that_failed_is_replaced_while_ranks_run(
    begin: Begin, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_ranks, "_LOOK_S", 0.0)
    before = psutil.Process().children()  # other tests may keep a process for themselves
    ranks = begin("echo 'srun: error: Node failure on n3' >&2; exec sleep 60", SLURMD_NODENAME="n1")
    try:
        wait_until(ranks.lost_node)
        wait_until(lambda: sorted(cluster.sweeps()) == ["n1,n2", "n2", "n3"])
        ranks.end()
        assert ranks.process.wait(20) == -signal.SIGKILL
        new = [child for child in psutil.Process().children() if child not in before]
        (deputy,) = [child for child in new if child.status() != psutil.STATUS_ZOMBIE]
        assert deputy.is_running(), "it watches on between two attempts"
    finally:
        begin.launcher.clean(begin.run_dir)
    assert not deputy.is_running()


def test_clean_does_not_wait_for_a_dead_cluster(
    begin: Begin, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is about to be requeued, or to end, has no time to give away."""
    assert deputy_post._DISMISS_S + deputy_post._REAP_S + slurm._CLEAN_TIMEOUT_S <= 6
    monkeypatch.setattr(slurm, "_CLEAN_TIMEOUT_S", 0.5)
    monkeypatch.setattr(deputy_post, "_DISMISS_S", 0.2)
    ranks = begin("trap '' TERM; while :; do sleep 0.1; done", SLURMD_NODENAME="n1")
    wait_until(lambda: len(cluster.sweeps()) == 2)
    ranks.end()
    cluster.commands.script("squeue", "exec sleep 60")
    began_s = time.monotonic()
    begin.launcher.clean(begin.run_dir)
    assert time.monotonic() - began_s < 3
    assert ranks.process.wait(20) == -signal.SIGKILL
