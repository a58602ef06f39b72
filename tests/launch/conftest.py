from __future__ import annotations

import shlex
from pathlib import Path

import pytest


class Commands:
    """Small executables named as Slurm's, which give answers written down by the test and note how they were called.

    A real slurmctld does not refuse, fall silent or lie on demand; against a real one runs tests/slurm.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def script(self, name: str, body: str) -> None:
        """`body` is sh, after the call was noted."""
        note = f'for word in "$@"; do printf "%s\\n" "$word"; done >> {shlex.quote(str(self.folder))}/{name}.calls'
        ending = f'printf "\\n" >> {shlex.quote(str(self.folder))}/{name}.calls'
        path = self.folder / f"{name}.new"
        path.write_text(f"#!/bin/sh\n{note}\n{ending}\n{body}\n")
        path.chmod(0o755)
        path.rename(self.folder / name)  # one that runs just now is not torn

    def answer(self, name: str, out: str = "", err: str = "", code: int = 0) -> None:
        """The same answer to everything."""
        say = f"printf %s {shlex.quote(out)}; printf %s {shlex.quote(err)} >&2; exit {code}"
        self.script(name, say)

    def squeue(self, **answers: str) -> None:
        """Answers by the letter, or the word, of the format: `squeue(l="1:00", State="RUNNING 0")`; others fail."""
        keys = {key: f"%{key}" if len(key) == 1 else f"{key}:" for key in answers}
        cases = [f"*{keys[key]}*) printf %s {shlex.quote(text)}; exit 0;;" for key, text in answers.items()]
        self.script("squeue", "\n".join(['case "$*" in', *cases, "esac", "exit 1"]))

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of every call so far."""
        path = self.folder / f"{name}.calls"
        text = path.read_text() if path.exists() else ""
        return [call.split("\n") for call in text.split("\n\n") if call]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Nothing but these commands is on PATH."""
    found = Commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(found.folder))
    return found
