"""What can happen to a job, played on a real cluster with the scripts that ship; `test_scenarios` runs them all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.h5.pack import PackOptions, pack_path
from hpctrain.h5.packed import open_packed
from hpctrain.minicluster import faults
from hpctrain.staging.stored import file_keys_of, stored_chunks
from tests.slurm.lab import Lab, job_environment
from tests.support import ROOT, read_json
from tests.toy import STEPS

Play = Callable[[Lab, str], None]


@dataclass(frozen=True)
class Scenario:
    """`play(lab, digest)`; `nodes` of its own (0: the nodes that gentle scenarios share)."""

    play: Play
    nodes: int


SCENARIOS: dict[str, Scenario] = {}


def scenario(nodes: int = 0) -> Callable[[Play], Play]:
    """Register a scenario under its function's name."""

    def register(play: Play) -> Play:
        SCENARIOS[play.__name__] = Scenario(play, nodes)
        return play

    return register


def lost_steps(lab: Lab) -> int:
    """Steps of attempt 1 that attempt 2 had to do again, from what rank 0 said last."""
    second = lab.attempts()[1]
    return lab_last_step(lab, 1) - int(read_json(second.path / "restored.json")["step"])


def lab_last_step(lab: Lab, attempt: int) -> int:
    """The last step that rank 0 spoke of when it left (`stop`), else the last it reported."""
    events = lab.run_dir / "attempts" / f"a{attempt:04d}" / "events" / "rank-0.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    return max(event["step"] for event in lines if event["kind"] in ("stop", "step"))


def hosts_of_ranks(lab: Lab, attempt: int) -> list[str]:
    """Where each rank of an attempt ran, as it said itself."""
    folder = lab.run_dir / "attempts" / f"a{attempt:04d}" / "ranks"
    return [read_json(folder / f"{rank}.pid.json")["host"] for rank in range(2)]


# ---- The end of the job's time -----------------------------------------------------------------------------------


@scenario()
def warning_before_the_walltime(lab: Lab, digest: str) -> None:
    """USR1 comes early; the clock chooses the moment; one requeue, no step lost."""
    job = lab.submit("--time=1", "--signal=B:USR1@55", sleep_s=0.35)
    facts = lab.finish(job, digest)
    assert "SIGUSR1:" in lab.log(), lab.report()
    assert "s are left of the job; saving before its end" in lab.log(), lab.report()
    assert "left on the end of the job's time" in lab.log(), lab.report()
    assert (lab.endings()[0], facts.restarts) == ("leave", len(lab.endings()) - 1), lab.report()
    assert lost_steps(lab) == 0, lab.report()


@scenario()
def walltime_without_a_warning(lab: Lab, digest: str) -> None:
    """No signal at all: the supervisor's own clock is enough."""
    job = lab.submit("--time=1", "--signal=B:URG@1", sleep_s=0.35)
    facts = lab.finish(job, digest)
    assert "SIGUSR1:" not in lab.log(), lab.report()
    assert (lab.endings()[0], facts.restarts) == ("leave", len(lab.endings()) - 1), lab.report()
    assert lost_steps(lab) == 0, lab.report()


@scenario()
def walltime_too_short_for_a_step(lab: Lab, digest: str) -> None:
    """No loop: it stops after `max_no_progress` starts, and says why."""
    job = lab.submit("--time=1", sleep_s=5.0, resilience__leave_margin_s=50, resilience__max_no_progress=2)
    facts = lab.until_over(job)
    assert (facts.state, facts.exit_code, facts.restarts) == ("FAILED", 72, 1), lab.report()
    assert "the last 2 attempts committed no newer step" in lab.log(), lab.report()
    lab.nothing_is_left()


# ---- Signals and the queue ---------------------------------------------------------------------------------------


@scenario()
def signal_to_the_steps(lab: Lab, digest: str) -> None:
    """`scancel -s USR1` reaches the ranks and not the batch script: they leave, the job is requeued once."""
    job = lab.submit(sleep_s=0.2, faults="sleep@checkpoint.write:rank=0,attempt=1,s=3")
    lab.until_step(12)
    lab.slurm("scancel", "-s", "USR1", job)
    time.sleep(2)  # the step at hand is done, and the save takes 3 s
    lab.slurm("scancel", "-s", "USR1", job)  # a second one during the save changes nothing
    facts = lab.finish(job, digest)
    assert (lab.endings(), facts.restarts) == (["leave", "done"], 1), lab.report()
    assert lost_steps(lab) == 0, lab.report()
    assert read_json(lab.attempts()[1].path / "start.json")["restart"] == 1, lab.report()


@scenario()
def signal_to_the_batch_script(lab: Lab, digest: str) -> None:
    """With hours left, a warning means now; scontrol is missing: a successor takes over, and its budget goes on."""
    job = lab.submit("--time=300", sleep_s=0.2, environment={"PATH": path_without(lab, "scontrol")})
    lab.until_step(12)
    lab.slurm("scancel", "-b", "-s", "USR1", job)
    lab.until("a successor", lambda: "will go on after it" in lab.log())
    lab.until("the result", lambda: lab.result())
    successor = lab.attempts()[1].start
    assert successor is not None
    assert "scontrol is not on PATH" in lab.log(), lab.report()
    assert (successor.job != job, successor.submission) == (True, job), lab.report()
    assert lab.facts(job).restarts == 0, lab.report()
    lab.finish(successor.job, digest)
    assert (lab.endings(), lost_steps(lab)) == (["leave", "done"], 0), lab.report()


@scenario()
def requeue_is_forbidden(lab: Lab, digest: str) -> None:
    """`--no-requeue`: a successor."""
    job = lab.submit("--no-requeue", sleep_s=0.2)
    lab.until_step(12)
    lab.slurm("scancel", "-b", "-s", "USR1", job)
    lab.until("a successor", lambda: "will go on after it" in lab.log())
    lab.until("the result", lambda: lab.result())
    successor = lab.attempts()[1].start
    assert successor is not None
    lab.finish(successor.job, digest)
    assert lab.facts(job).restarts == 0, lab.report()


@scenario(nodes=3)
def other_nodes_the_next_time(lab: Lab, digest: str) -> None:
    """The node that is left keeps its rank, whose chunks its SSD has, though Slurm names it first now."""
    gone, left, new = lab.cluster.spec.partitions[lab.partition]
    job = lab.submit(f"--nodelist={gone},{left}", sleep_s=0.05)
    lab.until_step(3)
    lab.slurm("scancel", job)
    lab.until_over(job)
    again = lab.submit(f"--nodelist={left},{new}", sleep_s=0.05)
    lab.finish(again, digest, cancelled_before=True)
    assert hosts_of_ranks(lab, 1) == [gone, left], lab.report()
    assert hosts_of_ranks(lab, 2) == [new, left], lab.report()


@scenario(nodes=2)
def preemption(lab: Lab, digest: str) -> None:
    """A job of a higher partition takes the nodes: the state is saved in the grace time, and nothing is lost."""
    job = lab.submit("--exclusive", "--time=9", sleep_s=0.6)  # a short limit must not be mistaken for the end
    lab.until_step(5)
    urgent = faults.preempt(lab.cluster, faults.nodes_of_job(lab.cluster, job), 5)
    lab.until("the urgent job to start", lambda: lab.facts(urgent).state in ("RUNNING", "COMPLETED"))
    facts = lab.finish(job, digest)
    assert (lab.endings(), facts.restarts) == (["leave", "done"], 1), lab.report()
    assert lost_steps(lab) == 0, lab.report()


@scenario()
def cancelled_by_the_user(lab: Lab, digest: str) -> None:
    """It stays cancelled, with its state saved; submitted again, it goes on from there."""
    job = lab.submit(sleep_s=0.2)
    lab.until_step(12)
    lab.slurm("scancel", job)
    facts = lab.until_over(job)
    assert (facts.state, facts.restarts) == ("CANCELLED", 0), lab.report()
    lab.nothing_is_left(shared_memory=False)
    time.sleep(25)  # longer than a requeue takes here
    assert lab.facts(job).state == "CANCELLED", lab.report()
    assert len(lab.attempts()) == 1, lab.report()
    again = lab.submit(sleep_s=0.2)
    lab.finish(again, digest, cancelled_before=True)
    assert read_json(lab.attempts()[1].path / "restored.json")["step"] >= 10, lab.report()


@scenario()
def two_jobs_on_one_run_directory(lab: Lab, digest: str) -> None:
    """The second refuses, with the id of the first; the first is not disturbed."""
    job = lab.submit(sleep_s=0.2)
    lab.until_step(1)
    second = lab.submit("--job-name=second", sleep_s=0.2)
    facts = lab.until_over(second)
    assert (facts.state, facts.exit_code, facts.restarts) == ("FAILED", 78, 0), lab.report()
    assert f"in use by Slurm job {job}" in lab.log(), lab.report()
    lab.finish(job, digest)
    assert lab.endings() == ["done"], lab.report()


@scenario()
def job_array_of_two(lab: Lab, digest: str) -> None:
    """Two members, two runs; one is told to leave and comes back, and the other is not requeued with it."""
    first, second = lab.describe("first", sleep_s=0.2), lab.describe("second", sleep_s=0.2)
    for path in (first, second):
        path.rename(path.parent.with_suffix(".toml"))
    runs = lab.folder / "runs"
    names = [lab.folder / "first.toml", lab.folder / "second.toml"]
    job = lab.submit("--array=1-2", script="sweep.sbatch", arguments=[runs, *names])
    lab.until_step(12, run_dir=runs / "second")
    lab.slurm("scancel", "-b", "-s", "USR1", f"{job}_2")
    assert lab.finish(f"{job}_2", digest, runs / "second").restarts == 1, lab.report()
    assert lab.finish(f"{job}_1", digest, runs / "first").restarts == 0, lab.report()
    assert (len(lab.attempts(runs / "first")), len(lab.attempts(runs / "second"))) == (1, 2), lab.report()


# ---- Processes that die ------------------------------------------------------------------------------------------


@scenario()
def a_rank_is_killed(lab: Lab, digest: str) -> None:
    """Relaunched inside the allocation, from the last checkpoint; paths hold spaces and percent signs."""
    description = lab.describe("my runs", sleep_s=0.1)
    run_dir = lab.folder / "my runs" / "run %t 100%"
    job = lab.submit(arguments=[description, "--dir", run_dir], faults="kill@step:rank=1,step=17,attempt=1")
    facts = lab.finish(job, digest, run_dir)
    first, second = lab.attempts(run_dir)
    assert facts.restarts == 0, lab.report()
    assert first.end is not None
    assert (str(first.end.failure), first.end.blamed_rank) == ("killed", 1), lab.report()
    assert "task 1: Killed" in (first.end.launcher_says or ""), lab.report()
    assert read_json(second.path / "restored.json")["step"] == 10, lab.report()
    for rank in (0, 1):
        assert (second.path / "logs" / f"rank-{rank}.log").exists(), lab.report()


@scenario()
def a_rank_is_killed_under_mpirun(lab: Lab, digest: str) -> None:
    """The same with mpirun inside the job, and a command in front of every rank as a container would be."""
    job = lab.submit(
        sleep_s=0.1,
        faults="kill@step:rank=1,step=17,attempt=1",
        environment={"HPCTRAIN_LAUNCHER": "mpirun", "HPCTRAIN_CONTAINER": "env CONTAINED=1"},
    )
    lab.finish(job, digest)
    assert lab.endings() == ["killed", "done"], lab.report()


@scenario(nodes=2)
def slurmctld_restarts(lab: Lab, digest: str) -> None:
    """A rank dies while slurmctld is away: the relaunch waits for it. Jobs of other scenarios do not notice."""
    job = lab.submit(sleep_s=0.2, faults="kill@step:rank=1,step=30,attempt=1")
    lab.until_step(12)
    faults.kill_controller(lab.cluster)
    try:
        lab.until("the end of the attempt", lambda: lab.attempts()[0].end)
        time.sleep(3)
        assert len(lab.attempts()) == 1
    finally:
        faults.restart_controller(lab.cluster)
    facts = lab.finish(job, digest)
    assert (lab.endings(), facts.restarts) == (["killed", "done"], 0), lab.report()


@scenario()
def a_bug_of_the_user(lab: Lab, digest: str) -> None:
    """Not-a-number stops the run at once: no relaunch, no requeue."""
    job = lab.submit(task_bad_step=9)
    facts = lab.until_over(job)
    assert (facts.state, facts.exit_code, facts.restarts) == ("FAILED", 65, 0), lab.report()
    assert lab.endings() == ["user"], lab.report()
    assert "not finite" in lab.log(), lab.report()
    lab.nothing_is_left()


@scenario()
def an_exception_in_every_attempt(lab: Lab, digest: str) -> None:
    """Tried again within the budget, then given up: no loop through the queue."""
    job = lab.submit(faults="raise@step:rank=1,step=3", resilience__max_no_progress=2)
    facts = lab.until_over(job)
    assert (facts.state, facts.exit_code, facts.restarts) == ("FAILED", 70, 0), lab.report()
    assert lab.endings() == ["bug", "bug"], lab.report()
    lab.nothing_is_left()


@scenario()
def a_launcher_that_makes_singletons(lab: Lab, digest: str) -> None:
    """PMI-2 and an MPI that does not speak it: every rank is alone, and is told what to do."""
    job = lab.submit(environment={"HPCTRAIN_LAUNCHER": "srun-pmi2"})
    facts = lab.until_over(job)
    assert (facts.state, facts.exit_code) == ("FAILED", 78), lab.report()
    assert "srun --mpi=pmix" in lab.log(), lab.report()


# ---- Nodes -------------------------------------------------------------------------------------------------------


def other_node(lab: Lab, job: str) -> str:
    """A node of the job on which ranks run and the batch script does not."""
    facts = lab.facts(job)
    start = lab.attempts()[0].start
    assert start is not None
    return next(node for node in start.nodes if node != facts.batch_host)


@scenario(nodes=3)
def a_node_dies_with_a_spare(lab: Lab, digest: str) -> None:
    """Relaunched on the spare node, without the queue."""
    job = lab.submit("--nodes=3", sleep_s=0.2, cluster__spare_nodes=1)
    lab.until_step(12)
    dead = other_node(lab, job)
    faults.kill_node(lab.cluster, dead)
    facts = lab.finish(job, digest)
    _, second = lab.attempts()
    assert facts.restarts == 0, lab.report()
    assert second.start is not None
    assert dead not in second.start.nodes, lab.report()
    assert read_json(second.path / "restored.json")["step"] >= 10, lab.report()
    lab.nodes_are_idle(*second.start.nodes)
    faults.heal_node(lab.cluster, dead)


@scenario(nodes=3)
def a_node_dies_without_a_spare(lab: Lab, digest: str) -> None:
    """Requeued onto the nodes that are left."""
    job = lab.submit("--nodes=2", sleep_s=0.2)
    lab.until_step(12)
    dead = other_node(lab, job)
    faults.kill_node(lab.cluster, dead)
    facts = lab.finish(job, digest)
    second = lab.attempts()[1].start
    assert (facts.restarts, len(lab.attempts())) == (1, 2), lab.report()
    assert second is not None
    assert dead not in second.nodes, lab.report()
    faults.heal_node(lab.cluster, dead)


@scenario(nodes=2)
def a_node_dies_and_fewer_ranks_go_on(lab: Lab, digest: str) -> None:
    """`min_ranks`: the lanes are dealt to the ranks that are left (other sums, so the last bits may differ)."""
    job = lab.submit("--nodes=2", sleep_s=0.1, cluster__min_ranks=1)
    lab.until_step(12)
    dead = other_node(lab, job)
    faults.kill_node(lab.cluster, dead)
    facts = lab.until_over(job)
    assert (facts.state, facts.restarts) == ("COMPLETED", 0), lab.report()
    assert (lab.result()["ranks"], lab.result()["steps"]) == (1, STEPS), lab.report()
    faults.heal_node(lab.cluster, dead)


@scenario(nodes=3)
def the_batch_host_dies(lab: Lab, digest: str) -> None:
    """The supervisor is gone; its deputy requeues the job, and the next one finds an attempt without an end."""
    job = lab.submit("--nodes=2", sleep_s=0.2)
    lab.until_step(12)
    dead = lab.facts(job).batch_host
    faults.kill_node(lab.cluster, dead)
    facts = lab.finish(job, digest)
    assert facts.restarts == 1, lab.report()
    assert lab.endings() == ["died", "done"], lab.report()
    assert f"is no longer a node of job {job}" in (lab.run_dir / "deputy.log").read_text(), lab.report()
    assert "took over from another supervisor (host " in lab.log(), lab.report()
    faults.heal_node(lab.cluster, dead)


@scenario(nodes=2)
def the_network_is_cut(lab: Lab, digest: str) -> None:
    """The job goes on elsewhere while its first start still runs, cut off: a zombie, which must change nothing."""
    job = lab.submit("--nodes=1", "--ntasks-per-node=2", sleep_s=0.6)
    lab.until_step(12)
    host = lab.facts(job).batch_host
    faults.cut_node(lab.cluster, host)
    lab.until("the next start", lambda: len(lab.attempts()) > 1)
    # not the words of the one that took over, which are in the same log
    noticed = re.compile(r"is now owned by another supervisor|which another supervisor started")
    lab.until("the zombie to notice", lambda: noticed.search(lab.log()), 60)
    facts = lab.finish(job, digest)
    assert facts.restarts == 1, lab.report()
    assert (lab.endings()[0], lab.endings()[-1]) == ("died", "done"), lab.report()
    faults.heal_node(lab.cluster, host)


@scenario(nodes=2)
def a_node_is_rebooted(lab: Lab, digest: str) -> None:
    """Gone for a moment only: its ranks are lost, the node comes back, and the job with it."""
    job = lab.submit("--nodes=2", sleep_s=0.2)
    lab.until_step(12)
    node = other_node(lab, job)
    faults.reboot_node(lab.cluster, node)
    facts = lab.finish(job, digest)
    assert len(lab.attempts()) >= 2, lab.report()
    assert facts.restarts <= 1, lab.report()
    lab.nodes_are_idle(node)


@scenario(nodes=2)
def the_ssd_is_full(lab: Lab, digest: str) -> None:
    """One warning; training goes on from the shared filesystem."""
    nodes = lab.cluster.spec.partitions[lab.partition]
    for node in nodes:
        faults.fill_disk(lab.cluster, node)
    job = lab.submit("--nodes=2")
    lab.finish(job, digest)
    assert lab.endings() == ["done"], lab.report()
    assert lab.log().lower().count("no space") == 1, lab.report()
    for node in nodes:
        faults.heal_node(lab.cluster, node)


@scenario(nodes=2)
def staged_once(lab: Lab, digest: str) -> None:
    """Each chunk is read once from the shared filesystem, the others come from the other node; a second run reads none.

    `hpctrain stage` sees the copies of both nodes, and removes them.
    """
    ssd = "$HPCTRAIN_SSD/once"
    job = lab.submit("--nodes=2", sleep_s=0.0, staging__dir=ssd)
    lab.finish(job, digest)
    staging, num_bytes = read_json(lab.run_dir / "result.json")["staging"], stored_bytes(lab.data)
    assert staging["shared_bytes"] == num_bytes, staging
    assert staging["peer_bytes"] > 0, staging
    description, again = lab.describe("again", sleep_s=0.0, staging__dir=ssd), lab.folder / "run again"
    second = lab.submit("--nodes=2", arguments=[description, "--dir", again])
    assert lab.until_over(second).state == "COMPLETED", lab.report()
    found = read_json(again / "result.json")
    assert found["state_digest"] == digest
    assert (found["staging"]["shared_bytes"], found["staging"]["damaged_chunks"]) == (0, 0), found["staging"]
    stage = [sys.executable, "-m", "hpctrain.cli", "stage", description]
    allocate = ["salloc", f"--partition={lab.partition}", "--nodes=2", "--quiet"]
    shown = [
        json.loads(line) for line in lab.slurm(*allocate, *stage, "--status", "--json").splitlines() if line
    ]
    present = [mirror["present_bytes"] for node in shown for mirror in node["mirrors"]]
    assert len({node["node"] for node in shown}) == 2, shown
    assert sum(present) >= num_bytes, "what others need was kept too, since there is room"
    lab.slurm(*allocate, *stage, "--clean")
    assert lab.slurm(*allocate, *stage, "--status").count("nothing is staged") == 2


# ---- The other scripts -------------------------------------------------------------------------------------------


@scenario()
def pack_and_bench(lab: Lab, digest: str) -> None:
    """`pack.sbatch` packs, by one task and by two on two nodes; and `bench.sbatch` starts the benchmarks."""
    source = lab.folder / "a folder" / "numbers.npy"
    source.parent.mkdir()
    np.save(source, np.arange(600, dtype=np.float32).reshape(100, 6))
    packed = lab.folder / "packed set"
    job = lab.submit("--nodes=1", script="pack.sbatch", arguments=[source, packed])
    small = ["--shard-mib", "0.0005", "--chunk-samples", "7"]
    several = lab.submit(
        "--nodes=2", "--ntasks=2", script="pack.sbatch", arguments=[source, lab.folder / "by two", *small]
    )
    bench = lab.submit("--nodes=1", script="bench.sbatch", arguments=["storage", "--help"])
    assert lab.until_over(job).state == "COMPLETED", lab.report()
    assert read_json(packed / "dataset.json")["num_samples"] == 100, lab.report()
    assert lab.until_over(several).state == "COMPLETED", lab.report()
    pack_path(source, lab.folder / "by one", PackOptions(shard_mib=0.0005, chunk_samples=7))
    files = [{f.name: f.read_bytes() for f in (lab.folder / name).iterdir()} for name in ("by one", "by two")]
    assert len(files[0]) > 3
    assert files[0] == files[1], lab.report()
    assert lab.until_over(bench).state == "COMPLETED", lab.report()
    assert "Codecs and chunk sizes" in lab.log(), lab.report()


def stored_bytes(data: Path) -> int:
    """Of the chunks of a packed set."""
    packed = open_packed(data)
    return stored_chunks(packed, file_keys_of(packed)).num_bytes


def path_without(lab: Lab, program: str) -> str:
    """A PATH on which everything is but one program."""
    folder = lab.folder / "bin"
    folder.mkdir()
    for path in os.scandir("/usr/bin"):
        if path.name != program:
            (folder / path.name).symlink_to(path.path)
    return f"{os.path.dirname(sys.executable)}:{folder}"


def local_digest(lab: Lab) -> str:
    """What the run ends with when nothing happens to it: on this machine, under mpirun."""
    description = lab.describe("undisturbed", sleep_s=0.0, staging__dir=str(lab.folder / "ssd"))
    command = [
        sys.executable,
        "-m",
        "hpctrain.cli",
        "run",
        str(description),
        "-n",
        "2",
        "--dir",
        str(lab.run_dir),
    ]
    done = subprocess.run(
        command, env=job_environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    digest: str = read_json(lab.run_dir / "result.json")["state_digest"]
    return digest
