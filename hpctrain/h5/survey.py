"""What is in an HDF5 file that nobody vouches for, found out by a child process that may crash.

libhdf5 can be brought down by a damaged file: it crashes, loops or asks for all memory. So the looking is done by
`hpctrain.h5.survey_child` in a process with a memory limit. It says which object it is about to touch before touching
it. When it dies or falls silent, that object is the finding, and a new child goes on with the others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import hpctrain
from hpctrain.errors import DataError
from hpctrain.h5.survey_facts import DatasetSurvey, FileSurvey, Finding, Limits, LinkSurvey

CHILD_COMMAND: Final = (sys.executable, "-P", "-m", "hpctrain.h5.survey_child")
_STDERR_TAIL_BYTES: Final = 500
_PIECE_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 1 << 22
_START_TIMEOUT_S: Final = 120.0  # Python and its libraries, read from a shared filesystem by many

_NONSENSE: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What comes of lines that are not those of our child: one that crashes may write anything."""

Step = tuple[str, str]
"""An object by its path, and what is done with it: "open" or "attributes"."""


@dataclass
class _Found:
    """What the children told so far; what a later child tells again takes the place of the same."""

    groups: set[str] = field(default_factory=set)
    datasets: dict[str, DatasetSurvey] = field(default_factory=dict)
    links: dict[str, LinkSurvey] = field(default_factory=dict)
    findings: dict[Finding, None] = field(default_factory=dict)
    skip: list[Step] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)
    refused: str = ""
    cut: str = ""

    def take(self, kind: str, value: Any) -> None:
        if kind == "group":
            self.groups.add(value)
        elif kind == "dataset":
            found = DatasetSurvey(**{key: _frozen(item) for key, item in value.items()})
            self.datasets[found.name] = found
        elif kind == "link":
            self.links[value["name"]] = LinkSurvey(**value)
        elif kind == "finding":
            self.findings[Finding(**value)] = None
        elif kind == "refused":
            self.refused = value
        elif kind == "cut":
            self.cut = value

    def died(self, step: Step | None, cause: str, limits: Limits) -> bool:
        """Note the death of a child; whether another may follow."""
        if step is None:
            self.refused = cause
            return False
        self.skip.append(step)
        self.findings[Finding(step[0], cause)] = None
        if len(self.skip) < limits.max_deaths:
            return True
        self.cut = f"given up after {limits.max_deaths} objects that cannot be touched"
        return False


def survey(
    path: Path,
    limits: Limits | None = None,
    verify_chunks: int = 4,
    progress: Callable[[str], None] | None = None,
    wanted: Iterable[str] = (),
) -> FileSurvey:
    """Look at everything in an HDF5 file, without following links out of it.

    Before that the datasets `wanted` are opened by these names, which may lead through links as those of a run do.
    `verify_chunks` chunks of each dataset that is read in parallel are compared with libhdf5; `progress` is called
    with the path of every object. Nothing is raised for a bad file: the survey says what is wrong with it.
    """
    limits = limits or Limits()
    try:
        file_bytes = _bytes_of(path)
    except DataError as error:
        return FileSurvey(path, refused=str(error))
    found = _Found(wanted=[f"/{name.strip('/')}" for name in wanted])
    while _one_child(path, limits, verify_chunks, found, progress or _silent):
        pass
    return FileSurvey(
        path,
        file_bytes,
        found.refused,
        found.cut,
        len(found.groups),
        tuple(found.datasets.values()),
        tuple(found.links.values()),
        tuple(found.findings),
    )


def _bytes_of(path: Path) -> int:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: not a regular file; name an HDF5 file")
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return status.st_size


def _one_child(
    path: Path, limits: Limits, verify_chunks: int, found: _Found, progress: Callable[[str], None]
) -> bool:
    """Run one child to its end; whether another has to go on."""
    request = {
        "path": os.fspath(path.absolute()),
        "limits": asdict(limits),
        "verify_chunks": verify_chunks,
        "skip": found.skip,
        "done": list(found.datasets),
        "wanted": found.wanted,
    }
    at: Step | None = None
    with tempfile.TemporaryFile() as errors, _start(request, errors) as child:
        try:
            for line in _lines(child, limits.object_timeout_s):
                kind, value = json.loads(line)
                if kind == "at":
                    at = (value[0], value[1])
                    progress(at[0])
                elif kind == "end":
                    return False
                else:
                    found.take(kind, value)
            cause = _cause_of_death(child.wait(limits.object_timeout_s), errors)
        except (TimeoutError, subprocess.TimeoutExpired):
            cause = f"looking at it took longer than {limits.object_timeout_s:g} s"
        except _NONSENSE as error:
            cause = f"looking at it went wrong: {error}"
        finally:
            child.kill()
    return found.died(at, cause, limits)


def _start(request: dict[str, Any], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """A child that imports from where this process does; without thread pools, which cost address space and time.

    It reads the request from a file: a pipe that is full would wait for a child that hangs.
    """
    root = str(Path(hpctrain.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as question:
        question.write(json.dumps(request).encode())
        question.seek(0)
        return subprocess.Popen(CHILD_COMMAND, stdin=question, stdout=subprocess.PIPE, stderr=errors, env=env)


def _lines(child: subprocess.Popen[bytes], timeout_s: float) -> Iterator[bytes]:
    """The lines a child writes; raises `TimeoutError` when none comes for `timeout_s`; the first may take longer."""
    if child.stdout is None:
        raise TypeError("the child was started without a pipe from its output")
    descriptor = child.stdout.fileno()
    poller = select.poll()
    poller.register(descriptor, select.POLLIN | select.POLLHUP)
    rest, end_s = b"", time.monotonic() + max(timeout_s, _START_TIMEOUT_S)
    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0 or not poller.poll(left_s * 1000):
            raise TimeoutError
        piece = os.read(descriptor, _PIECE_BYTES)
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            yield line
            end_s = time.monotonic() + timeout_s


def _cause_of_death(returncode: int, errors: IO[bytes]) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - _STDERR_TAIL_BYTES))
    last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    how = (
        f"libhdf5 crashes on it ({signal.Signals(-returncode).name})"
        if returncode < 0
        else f"looking at it ended with exit code {returncode}"
    )
    return f"{how}: {last}" if last else how


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _silent(name: str) -> None:
    del name
