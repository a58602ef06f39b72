"""`hpctrain pack` as it is typed."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import get_type_hints

import h5py
import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.cli.pack import pack
from hpctrain.h5.codecs import CODECS
from hpctrain.h5.packed import open_packed
from tests.support import ROOT


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(500, 64)))
    return tmp_path / "x.npy"


def test_a_pack_ends_with_a_summary(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--codec gzip --store float16 --chunk-samples 100 --shard-mib 0.03 --threads 2"
    main_ok(["pack", str(raw), str(tmp_path / "set"), *options.split()])
    packed = open_packed(tmp_path / "set")
    assert (packed.chunk_samples, len(packed.shards)) == (100, 3)
    assert (packed.fields["data"].dtype, packed.fields["data"].codec) == (np.float16, "gzip")
    out = capsys.readouterr().out
    assert re.fullmatch(
        rf"{tmp_path}/set: 500 samples in 3 shards, 100 per chunk, gzip; 0\.1 MB raw, 0\.1 MB stored "
        rf"\(ratio \d\.\d\d\), \d+\.\d MB/s; identity {packed.identity}\n",
        out,
    )


def test_rounding_is_in_the_summary(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_ok(["pack", str(raw), str(tmp_path / "set"), "--keep-bits", "9"])
    assert "blosc-lz4; data rounded to 9 bits; 0.3 MB raw" in capsys.readouterr().out


def test_auto_shows_its_table_and_rule(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--codec", "auto", "--chunk-samples", "250", "--storage-gb-per-s", "0.05"]
    main_ok(["pack", str(raw), str(tmp_path / "set"), *arguments])
    out, err = capsys.readouterr()
    codec = open_packed(tmp_path / "set").fields["data"].codec
    rows = [line for line in err.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(CODECS)
    (taken,) = (row for row in rows if "taken" in row)
    assert taken.startswith(f"| {codec} | 250 |")
    assert "rule: highest 1 / (1 / decode" in err
    assert "storage 0.05 GB/s per core" in err
    assert f"250 per chunk, {codec};" in out


def test_the_help_names_every_codec() -> None:
    (option,) = (item for item in get_type_hints(pack, include_extras=True)["codec"].__metadata__)
    assert all(re.search(rf"\b{name}\b", option.help) for name in CODECS)


def test_hdf5_fields_and_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["run/u"] = np.array([1.0, np.nan, 3.0])
        file["run/v"] = np.arange(3)
    command = ["pack", str(tmp_path / "x.h5"), str(tmp_path / "set")]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--clean", "nonfinite=fatal"])
    assert ended.value.code == 65
    assert "sample 1: field 'u': nan is not finite; mend the source" in capsys.readouterr().err
    main_ok([*command, "--field", "speed=/run/u", "--field", "/run/v"])
    assert list(open_packed(tmp_path / "set").fields) == ["speed", "v"]
    assert "'speed' has values that are not finite" in capsys.readouterr().err


def main_ok(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0


def test_overwrite(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_ok(["pack", str(raw), str(tmp_path / "set")])
    with pytest.raises(SystemExit) as ended:
        main(["pack", str(raw), str(tmp_path / "set")])
    assert ended.value.code == 64
    assert "or replace it with --overwrite" in capsys.readouterr().err
    main_ok(["pack", str(raw), str(tmp_path / "set"), "--overwrite", "--codec", "none"])
    assert open_packed(tmp_path / "set").fields["data"].codec == "none"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "set"], 64, "nowhere: there is no such file or folder"),
        (["loop", "set"], 64, "loop: there is no such file or folder"),
        (["x.npy", "set", "--codec", "rar"], 64, "codec 'rar' is unknown; choose one of: none, gzip"),
        (["x.npy", "set", "--chunk-samples", "0"], 64, "chunk-samples is 0, but must be at least 1"),
        (["x.npy", "set", "--size", "8"], 64, "--size, --gray and --keep-encoded are for pictures"),
        (["empty", "set"], 65, "empty has no class sub-folders (0 other entries); put"),
        (["bad", "set"], 65, "a/1.png: does not decode as an image"),
    ],
)
def test_bad_input_is_one_message_and_the_right_code(
    raw: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "bad" / "a").mkdir(parents=True)
    (tmp_path / "bad" / "a" / "1.png").write_bytes(b"no picture")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["pack", *arguments])
    assert ended.value.code == code
    err = capsys.readouterr().err
    assert err.startswith("hpctrain: ")
    assert message in err
    assert not [path.name for path in tmp_path.iterdir() if "set" in path.name]


def test_help_shows_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main_ok(["pack", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "Example: hpctrain pack photos/ packed/ --size 64 --codec blosc-zstd" in lines
    assert "Example: mpirun -n 4 hpctrain pack scans/ packed/ --clean undecodable=drop" in lines
    assert "- a packed set, to pack it otherwise" in lines


def test_opening_millions_of_files_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpctrain.cli.progress._LINE_INTERVAL_S", 0)
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for number in range(1100):
            archive.addfile(tarfile.TarInfo(f"{number}.txt"))
    main_ok(["pack", str(tmp_path / "x.tar"), str(tmp_path / "set")])
    err = capsys.readouterr().err
    assert "reading headers: 1024 files\n" in err
    assert "packing: 1100 of 1100 samples" in err


def test_warnings_go_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    np.save(raw / "x.npy", np.zeros(3))
    (raw / "notes.txt").write_text("x")
    main_ok(["pack", str(raw), str(tmp_path / "set")])
    assert "warning: 1 other files are left out (first: notes.txt)" in capsys.readouterr().err


def test_progress_is_a_bar_on_a_terminal(raw: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hpctrain.cli",
            "pack",
            str(raw),
            str(tmp_path / "set"),
            "--chunk-samples",
            "1",
        ],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # what Linux says at the end of a terminal
            break
        if not part:
            break
        shown += part
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"packing" in shown
    assert b"100%" in shown
    assert b"500 samples" in out


def test_cleaning_and_a_function_are_reported(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cli_features.py").write_text("def sign(sample):\n    return {'up': sample['data'][0] > 0}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = ["pack", str(raw), str(tmp_path / "set"), "--map", "cli_features:sign"]
    main_ok([*command, "--clean", "duplicates=drop", "--clean", "labels=drop"])
    out, err = capsys.readouterr()
    assert "warning: --clean labels=drop looked at nothing: no field `label` holds integers" in err
    lines = out.splitlines()
    assert lines[0] == "cleaning: 2 of 500 samples kept"
    assert lines[1].startswith("  duplicates: 498 dropped; sample ")
    assert lines[2:4] == ["  labels: 0 dropped", "  map: 0 dropped"]
    assert lines[4].startswith(f"{tmp_path}/set: 2 samples in 1 shards")
    assert open_packed(tmp_path / "set").fields["up"].dtype == np.uint8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clean", "nan=drop"], "clean: 'nan' is unknown"),
        (["--map", "nowhere:f"], "--map 'nowhere:f': importing nowhere failed"),
        (["--num-classes", "3"], "num-classes is for --clean labels=ACTION"),
        (["--max-pixels", "0"], "max-pixels is 0, but must be above 0"),
    ],
)
def test_wrong_options_of_cleaning(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pack", str(raw), str(tmp_path / "set"), *arguments])
    assert ended.value.code == 64
    assert message in capsys.readouterr().err


def test_nothing_of_mpi_is_loaded_for_one_process(raw: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom hpctrain.cli import main\ntry:\n    main(['pack', 'x.npy', 'set'])\n"
        "except SystemExit as end: print(end.code, [name for name in sys.modules if name.startswith('mpi4py')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.endswith("\n0 []\n"), done.stderr
    assert (tmp_path / "set" / "dataset.json").is_file()
