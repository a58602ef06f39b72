from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import hpctrain

DESCRIPTION = """
name = "trial"
[task]
name = "module:Class"
[data]
train = "packed"
[lanes]
num_lanes = 2
lane_batch = 4
[train]
epochs = 1
"""


def call(*arguments: str, **environment: str) -> tuple[int, str]:
    plain = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    done = hpctrain(["run", *arguments], env=plain | environment)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def description(tmp_path: Path) -> Path:
    path = tmp_path / "trial.toml"
    path.write_text(DESCRIPTION)
    return path


def test_help_has_an_example_and_the_exit_codes() -> None:
    code, text = call("--help")
    assert code == 0
    assert "hpctrain run digits.toml -n 2" in text
    assert "75 left or requeued" in text


@pytest.mark.parametrize(
    ("addition", "words"),
    [
        ("[trian]\nx = 1", "unknown key 'trian'; did you mean 'train'?"),
        ("warmup = 3", "unknown key 'train.warmup'"),
        ("seed = -1", "train.seed = -1"),
        ("seed = ", "not valid TOML"),
    ],
)
def test_a_wrong_description_is_78(description: Path, addition: str, words: str) -> None:
    description.write_text(DESCRIPTION + addition)
    code, text = call(str(description))
    assert code == 78
    assert words in text
    assert "Traceback" not in text


def test_a_missing_description_is_78(tmp_path: Path) -> None:
    code, text = call(str(tmp_path / "missing.toml"))
    assert code == 78
    assert "missing.toml" in text


def test_more_ranks_than_lanes_is_64(description: Path, tmp_path: Path) -> None:
    code, text = call(str(description), "-n", "3", "--dir", str(tmp_path / "run"))
    assert code == 64
    assert "3 ranks" in text
    assert "2 lanes" in text
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_no_run_is_78(description: Path, tmp_path: Path) -> None:
    for name in ("trial.toml", "run.toml"):  # the user's own file must not be taken for ours, and overwritten
        description = description.rename(tmp_path / name)
        code, text = call(str(description), "--dir", str(tmp_path))
        assert code == 78
        assert "choose another --dir" in text
        assert description.read_text() == DESCRIPTION


def test_the_default_directory_is_named_after_the_run(
    description: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "trial").mkdir(parents=True)
    (tmp_path / "runs" / "trial" / "thesis.tex").write_text("")
    monkeypatch.chdir(tmp_path)
    assert "runs/trial is not empty" in call(str(description))[1]


def test_neither_the_verb_nor_the_supervisor_load_torch_or_mpi() -> None:
    code = (
        "import sys, hpctrain.cli.run, hpctrain.resilience.supervisor, hpctrain.launch.slurm;"
        "print([name for name in ('torch', 'mpi4py', 'horovod') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--launcher", "jsrun"],
            "launcher 'jsrun': use one of auto, mpirun, srun-pmix, srun-pmi2, cray_shasta",
        ),
        (["--launcher", "srun-pmix"], "works inside a Slurm job; submit slurm/train.sbatch, or use mpirun"),
    ],
)
def test_a_launcher_that_cannot_be_is_64(
    description: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    code, text = call(str(description), "--dir", str(tmp_path / "run"), *arguments)
    assert code == 64
    assert words in text
    assert not (tmp_path / "run").exists()


def test_in_a_job_without_srun_it_is_said_what_to_load(description: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    code, text = call(
        str(description),
        "--dir",
        str(tmp_path / "run"),
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="n[1-2]",
        SLURM_TASKS_PER_NODE="1(x2)",
        PATH=str(tmp_path / "bin"),
    )
    assert code == 78
    assert "there is no srun on PATH in job 7; load your site's Slurm module" in text
    assert not (tmp_path / "run").exists()
