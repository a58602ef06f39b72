"""The job of this process, asked through commands that answer as the test wants (see `Commands`)."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.launch import slurm_job
from hpctrain.launch.slurm_job import SlurmJob, current_job, is_usable, parse_time
from tests.launch.conftest import Commands

GONE = "slurm_load_jobs error: Invalid job id specified\n"
SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "_RETRY_S", 0.01)
    monkeypatch.setattr(slurm_job, "_POLL_S", 0.01)
    monkeypatch.setattr(slurm_job, "_REQUEUE_DEADLINE_S", 0.3)


def job(**variables: str) -> SlurmJob:
    return SlurmJob({"SLURM_JOB_ID": "7", **variables})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4-03:02:01", 356521),
        ("03:02:01", 10921),
        ("02:01", 121),
        ("0:00", 0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
        ("1:2:3:4", None),
        ("-1:00", None),
    ],
)
def test_times_as_squeue_prints_them(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_all_times_can_be_read(days: int, hours: int, minutes: int, seconds: int) -> None:
    text = f"{minutes:02d}:{seconds:02d}"
    if days or hours:
        text = f"{hours:02d}:{text}"
    if days:
        text = f"{days}-{text}"
    assert parse_time(text) == ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("allocated", True),
        ("mixed", True),
        ("draining", True),
        ("idle", True),
        ("completing", True),
        ("allocated*", False),
        ("down", False),
        ("down*", False),
        ("fail", False),
        ("failing", False),
        ("powering_down", False),
        ("reboot^", False),
        ("unknown", False),
    ],
)
def test_a_node_is_usable_where_slurm_hears_of_it(state: str, usable: bool) -> None:
    assert is_usable(state) is usable


def test_outside_slurm_there_is_no_job(commands: Commands) -> None:
    assert current_job({}) is None
    assert current_job({"SLURM_JOB_ID": ""}) is None
    found = current_job({"SLURM_JOB_ID": "7"})
    assert found is not None
    assert (found.id, found.submission, found.restart, found.submitted_unix_s) == ("7", "7", 0, None)


def test_who_the_job_is(commands: Commands) -> None:
    commands.squeue(V="2024-03-01T12:00:00\n")
    member = job(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="3", SLURM_RESTART_COUNT="2")
    assert (member.id, member.job_id, member.submission, member.restart) == ("5_3", "7", "5_3", 2)
    when = time.mktime(time.strptime("2024-03-01 12:00:00", "%Y-%m-%d %H:%M:%S"))
    assert member.submitted_unix_s == when
    successor = job(HPCTRAIN_SUBMISSION="4")
    assert (successor.id, successor.submission) == ("7", "4")


def test_the_time_left_is_what_squeue_says(commands: Commands) -> None:
    commands.squeue(L="1:30:00 N/A\n")
    assert job(SLURM_JOB_END_TIME="1").seconds_left() == 5400
    commands.squeue(L="UNLIMITED NONE\n")
    assert job().seconds_left() is None


def test_a_preempted_job_ends_with_its_grace_time(commands: Commands) -> None:
    """%L still counts from the time limit; only the end tells (seen with Slurm 22.05)."""
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 60))
    commands.squeue(L=f"8:55 {end}\n")
    assert job().seconds_left() == pytest.approx(60, abs=5)
    past = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 60))
    commands.squeue(L=f"8:55 {past}\n")
    assert job().seconds_left() == 0


def test_a_users_own_filters_change_no_answer(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "pending")
    monkeypatch.setenv("SINFO_PARTITION", "mine")
    commands.script("squeue", 'echo "${SQUEUE_STATES:-RUNNING} 0"')
    assert job().state() == "RUNNING"


def test_an_earlier_start_of_a_job_neither_requeues_nor_succeeds_the_later_one(commands: Commands) -> None:
    commands.squeue(State="RUNNING 2\n")
    commands.answer("scontrol")
    commands.answer("sbatch", "8\n")
    zombie = job(SLURM_RESTART_COUNT="1", HPCTRAIN_BATCH_SCRIPT="train.sbatch")
    assert zombie.state() == "REQUEUED"
    assert not zombie.come_back().assured
    assert commands.calls("scontrol") == commands.calls("sbatch") == []
    assert job(SLURM_RESTART_COUNT="2").come_back().assured


def test_cancelled_between_the_question_and_the_requeue(commands: Commands) -> None:
    folder = shlex.quote(str(commands.folder))
    commands.script("squeue", f"if [ -e {folder}/asked ]; then echo CANCELLED 0; else echo RUNNING 0; fi")
    commands.script("scontrol", f": > {folder}/asked; echo 'Job/step already completing' >&2; exit 1")
    commands.answer("sbatch", "8\n")
    found = job(**script_variables()).come_back()
    assert not found.assured
    assert "is CANCELLED, so nothing follows it" in found.words
    assert commands.calls("sbatch") == []


def test_the_batch_script_outlives_slurms_copy_of_it(commands: Commands, tmp_path: Path) -> None:
    commands.squeue(State="RUNNING 0\n")
    spooled = tmp_path / "slurm_script"
    spooled.write_text("#!/bin/bash\n")
    found = job(HPCTRAIN_BATCH_SCRIPT=str(spooled))
    found.keep_script(tmp_path)
    spooled.unlink()
    other = job(HPCTRAIN_BATCH_SCRIPT=str(spooled))  # on another node, where it never was
    other.keep_script(tmp_path)
    for one in (found, other):
        command = one.successor_command()
        assert command is not None
        assert command[-1] == str(tmp_path / "batch.sbatch")
    assert (tmp_path / "batch.sbatch").read_text() == "#!/bin/bash\n"


def test_the_variable_stands_in_for_a_squeue_that_does_not_answer(commands: Commands) -> None:
    commands.answer("squeue", err=SILENT, code=1)
    left_s = job(SLURM_JOB_END_TIME=str(int(time.time()) + 100)).seconds_left()
    assert left_s == pytest.approx(100, abs=5)
    assert job(SLURM_JOB_END_TIME="").seconds_left() is None
    (commands.folder / "squeue").unlink()
    assert job().seconds_left() is None


def test_a_command_that_hangs_is_no_answer(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "_ANSWER_TIMEOUT_S", 0.2)
    commands.script("squeue", "exec /bin/sleep 60")
    began_s = time.monotonic()
    assert job().state() is None
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    ("out", "err", "code", "alive"),
    [
        ("RUNNING\n", "", 0, True),
        ("PENDING\n", "", 0, True),
        ("REQUEUE_HOLD\n", "", 0, True),
        ("COMPLETING\n", "", 0, True),
        ("COMPLETED\nPENDING\n", "", 0, True),  # two members of an array
        ("CANCELLED\n", "", 0, False),
        ("", "", 0, False),
        ("", GONE, 1, False),
        ("", SILENT, 1, None),
    ],
)
def test_whether_another_job_lives(
    commands: Commands, out: str, err: str, code: int, alive: bool | None
) -> None:
    commands.answer("squeue", out, err, code)
    assert job().is_alive("12") is alive
    assert commands.calls("squeue")[-1][:4] == ["-h", "-j", "12", "-o"]


def test_without_squeue_nobody_knows(commands: Commands) -> None:
    assert job().is_alive("12") is None
    assert job().nodes() is None
    assert job().steps("hpctrain") is None


def test_nodes_of_the_job_and_whether_slurm_believes_them_alive(commands: Commands) -> None:
    commands.squeue(N="n[1-3]\n")
    commands.answer("sinfo", "n1 mixed\nn2 down*\nn3 allocated\nn3 allocated\n")  # n3 is in two partitions
    assert job().nodes() == {"n1": True, "n2": False, "n3": True}
    assert commands.calls("sinfo")[-1][:5] == ["-a", "-h", "-N", "-n", "n[1-3]"]
    commands.answer("sinfo")  # a site that hides its nodes: they are still the job's
    assert job().nodes() == {"n1": True, "n2": True, "n3": True}
    commands.squeue(N="\n")
    assert job().nodes() is None


def test_steps_are_known_by_their_names(commands: Commands) -> None:
    commands.squeue(i="7.0 hpctrain-a0001\n7.1 hpctrain-a0002\n7.batch batch\n7.extern extern\n\n")
    assert job().steps("hpctrain-a0002") == ["7.1"]
    assert job().steps("prted") == []
    commands.answer("squeue", err=GONE, code=1)
    assert job().steps("hpctrain") == []


def test_steps_are_killed_until_slurm_lists_them_no_more(commands: Commands) -> None:
    folder = shlex.quote(str(commands.folder))
    commands.script("squeue", f"[ -e {folder}/ended ] || printf '7.0 hpctrain-a0001\\n7.1 other\\n'")
    commands.script("scancel", f": > {folder}/ended")
    assert job().end_steps("hpctrain-a0001", 10.0) == []
    assert commands.calls("scancel") == [["-s", "KILL", "7.0"]]


def test_steps_that_stay_are_said(commands: Commands) -> None:
    commands.squeue(i="7.0 hpctrain-a0001\n")
    commands.answer("scancel")
    assert job().end_steps("hpctrain", 0.1) == ["7.0"]
    commands.answer("squeue", err=SILENT, code=1)
    assert job().end_steps("hpctrain", 0.1) is None


def test_a_running_job_is_requeued(commands: Commands) -> None:
    commands.squeue(State="RUNNING 0\n")
    commands.answer("scontrol")
    found = job().come_back()
    assert found.assured
    assert "job 7 is requeued" in found.words
    assert commands.calls("scontrol") == [["requeue", "7"]]


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PREEMPTED"])
def test_what_a_user_cancelled_stays_cancelled(commands: Commands, state: str) -> None:
    commands.squeue(State=f"{state} 0\n")
    commands.answer("scontrol")
    commands.answer("sbatch", "8\n")
    found = job(HPCTRAIN_BATCH_SCRIPT="train.sbatch").come_back()
    assert not found.assured
    assert f"job 7 is {state}, so it is not requeued" in found.words
    assert commands.calls("scontrol") == commands.calls("sbatch") == []


def test_a_slurmctld_that_restarts_is_waited_for(commands: Commands) -> None:
    folder = shlex.quote(str(commands.folder))
    commands.script(
        "squeue", f"if [ -e {folder}/back ]; then echo RUNNING 0; else : > {folder}/back; exit 1; fi"
    )
    commands.answer("scontrol")
    (commands.folder / "back").unlink(missing_ok=True)
    found = job()  # asks once, in vain
    (commands.folder / "back").unlink()
    assert found.come_back().assured


def test_with_squeue_silent_for_long_requeueing_is_tried(commands: Commands) -> None:
    commands.answer("squeue", err=SILENT, code=1)
    commands.answer("scontrol")
    assert job().come_back().assured


def script_variables(**more: str) -> dict[str, str]:
    return {"HPCTRAIN_BATCH_SCRIPT": "/home/me/my runs/train.sbatch", **more}


def test_where_requeueing_is_forbidden_a_successor_is_submitted(commands: Commands) -> None:
    commands.squeue(State="RUNNING 0\n", l="1:00:00\n")
    commands.answer("scontrol", err="Requested operation is presently disabled for job 7\n", code=1)
    commands.answer("sbatch", "8;cluster\n")
    found = job(**script_variables()).come_back()
    assert found.assured
    assert "presently disabled for job 7" in found.words
    assert "job 8 will go on after it" in found.words
    (call,) = commands.calls("sbatch")
    assert "--dependency=afterany:7" in call
    assert "/home/me/my runs/train.sbatch" in call


def test_without_scontrol_too(commands: Commands) -> None:
    commands.squeue(State="RUNNING 0\n")
    commands.answer("sbatch", "8\n")
    found = job(**script_variables()).come_back()
    assert found.assured
    assert "(scontrol is not on PATH): job 8" in found.words


def test_where_nothing_answers_the_command_is_printed(commands: Commands) -> None:
    commands.squeue(State="RUNNING 0\n")
    commands.answer("sbatch", err="sbatch: error: Access denied\n", code=1)
    found = job(**script_variables()).come_back()
    assert not found.assured
    assert "sbatch refuses a successor (sbatch: error: Access denied)" in found.words
    command = shlex.split(found.words.split("to go on: ")[1])
    assert command[0] == "sbatch"
    assert "/home/me/my runs/train.sbatch" in command


@pytest.mark.parametrize("known", [True, False])
def test_without_sbatch_or_script_it_is_left_to_the_user(commands: Commands, known: bool) -> None:
    commands.squeue(State="RUNNING 0\n")
    if not known:
        commands.answer("sbatch", "8\n")
    found = job(**(script_variables() if known else {})).come_back()
    assert not found.assured
    assert ("sbatch is not on PATH" if known else "HPCTRAIN_BATCH_SCRIPT is not set") in found.words
    assert "submit the same script again" in found.words
    assert commands.calls("sbatch") == []


def test_a_successor_is_like_the_job(commands: Commands) -> None:
    commands.squeue(l="1-00:00:00\n")
    command = job(
        **script_variables(
            SLURM_JOB_PARTITION="gpu",
            SLURM_JOB_ACCOUNT="physics",
            SLURM_JOB_QOS="long",
            SLURM_JOB_NAME="digits 2",
            SLURM_ARRAY_JOB_ID="5",
            SLURM_ARRAY_TASK_ID="3",
            SLURM_JOB_NUM_NODES="2",
            SLURM_NTASKS="8",
            SLURM_NTASKS_PER_NODE="4",
            SLURM_CPUS_PER_TASK="6",
            SLURM_GPUS_PER_TASK="1",
            SLURM_MEM_PER_NODE="4000",
            SLURM_SUBMIT_DIR="/home/me/my runs",
            HPCTRAIN_SUBMISSION="4_3",
            HPCTRAIN_BATCH_ARGUMENTS="my run.toml\n--dir\n/scratch/me/run",  # one per line, as the script says it
        )
    ).successor_command()
    assert command is not None
    assert command[0] == "sbatch"
    assert command[-4:] == ["/home/me/my runs/train.sbatch", "my run.toml", "--dir", "/scratch/me/run"]
    assert set(command[1:-4]) >= {
        "--parsable", "--dependency=afterany:7", "--open-mode=append", "--gpus-per-task=1", "--mem=4000",
            "--export=ALL,HPCTRAIN_SUBMISSION=4_3,SLURM_RESTART_COUNT=0",
        "--partition=gpu", "--account=physics", "--qos=long", "--job-name=digits 2", "--array=3", "--nodes=2",
        "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=6", "--chdir=/home/me/my runs", "--time=1-00:00:00",
    }  # fmt: skip


def test_options_that_the_job_was_not_given_are_not_invented(commands: Commands) -> None:
    command = job(**script_variables()).successor_command()
    assert command is not None
    options = {word.split("=")[0] for word in command if word.startswith("--")}
    assert options <= {"--parsable", "--dependency", "--open-mode", "--export", "--output"}
    assert job().successor_command() is None


def test_a_successor_writes_where_this_job_writes(tmp_path: Path) -> None:
    log = tmp_path / "slurm-100%.out"
    with log.open("w") as stream:
        found = slurm_job._output_of(f"/proc/self/fd/{stream.fileno()}")
    assert found == str(tmp_path / "slurm-100%%.out")
    assert slurm_job._output_of("/dev/null") is None
    assert slurm_job._output_of(str(tmp_path / "missing")) is None
