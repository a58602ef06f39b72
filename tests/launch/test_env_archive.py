"""Environment archives, with small virtual environments that are real ones, and processes that are killed."""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import hpctrain
from hpctrain.errors import ConfigError, DataError, HangError, HpctrainError, StorageError, UsageError
from hpctrain.launch.environment.archive import create_archive
from hpctrain.launch.environment.contents import probe_environment
from hpctrain.launch.environment.header import Header, encode_header, read_header
from hpctrain.launch.environment.mend import Mender
from hpctrain.launch.environment.unpack import expand, unpack_archive
from tests.support import ROOT

DEADLINE_S = 60.0
MODULES = ("plain", "by_path", "by_finder", "by_finder.deep", "single", "hpctrain")
SITE = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
COMMAND_LINE = """
import sys
from hpctrain.cli.env_archive import env_archive
from hpctrain.errors import HpctrainError
try:
    env_archive(sys.argv[1:])
except HpctrainError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def make_venv(path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True, timeout=DEADLINE_S)
    return path


def write(path: Path, text: str = "", mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def add_editable(venv: Path, name: str, pth: str, top_level: str | None = None) -> None:
    """What pip leaves of an editable installation: its metadata, and a .pth file that leads to it."""
    info = venv / SITE / f"{name}-1.0.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    write(info / "RECORD", f"__editable__.{name}.pth,,\n{info.name}/RECORD,,\n")
    write(info / "direct_url.json", json.dumps({"url": "file:///somewhere", "dir_info": {"editable": True}}))
    if top_level is not None:
        write(info / "top_level.txt", top_level)
    write(venv / SITE / f"__editable__.{name}.pth", pth)


def fill_venv(venv: Path, projects: Path) -> None:
    """Packages of each kind, scripts of each kind, and links of each kind."""
    site, python = venv / SITE, venv / "bin" / "python"
    write(site / "plain" / "__init__.py", "import sys\ndef main(): print('plain runs', *sys.argv[1:])\n")
    write(site / "plain" / ".git" / "config", "left out")
    write(site / "kept.pth", "import sys; sys.kept = True\n")
    subprocess.run([python, "-m", "compileall", "-q", str(site)], check=True, timeout=DEADLINE_S)

    write(projects / "path" / "src" / "by_path" / "__init__.py")
    write(projects / "path" / "src" / "by_path" / "data.toml", "x = 1")
    write(projects / "path" / "src" / "single.py")
    add_editable(venv, "by-path", f"{projects / 'path' / 'src'}\n")
    write(projects / "finder" / "anywhere" / "__init__.py")
    write(projects / "finder" / "anywhere" / "deep.py")
    finder = f"""
import sys
from importlib.util import spec_from_file_location
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "by_finder":
            folder = {str(projects / "finder" / "anywhere")!r}
            return spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.meta_path.append(Finder())
"""
    write(site / "_the_finder.py", finder)
    add_editable(venv, "by-finder", "import _the_finder\n", top_level="by_finder\n")

    body = "import plain\nplain.main()\n"
    write(venv / "bin" / "short", f"#!{python}\n{body}", 0o755)
    write(venv / "bin" / "long", f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n{body}", 0o755)
    (venv / "bin" / "absolute").symlink_to(venv / "bin" / "short")
    (venv / "bin" / "outside").symlink_to(write(projects / "tool", "#!/bin/sh\necho tool\n", 0o755))
    (venv / "bin" / "nowhere").symlink_to("/does/not/exist")
    (site / "linked").symlink_to("plain")
    write(venv.parent / "beside.txt")
    (venv / "loop").symlink_to(venv.parent)
    write(projects / "tools" / "one")
    (projects / "tools" / "self").symlink_to(projects / "tools")
    (venv / "tools").symlink_to(projects / "tools")


@dataclass(frozen=True)
class Made:
    """An archive whose environment and projects are not there any more."""

    archive: Path
    header: Header
    venv: Path
    projects: Path
    mtime_s: float


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("login")
    venv, projects = make_venv(root / "my env" / "venv"), root / "my projects"
    fill_venv(venv, projects)
    mtime_s = (venv / SITE / "plain" / "__init__.py").stat().st_mtime
    archived = create_archive(root / "env.tar.gz", venv)
    assert archived.warnings == []
    shutil.rmtree(venv.parent)
    shutil.rmtree(projects)
    return Made(root / "env.tar.gz", archived.header, venv, projects, mtime_s)


def run_python(python: Path, code: str) -> str:
    """Run code with nothing of this environment about."""
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False, env={}, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tree(root: Path) -> dict[str, Any]:
    """All that is below a directory."""
    return {
        str(path.relative_to(root)): os.readlink(path)
        if path.is_symlink()
        else path.is_dir() or path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def leftovers(directory: Path) -> list[str]:
    """What lies beside the unpacked environments."""
    return sorted(path.name for path in directory.rglob("partial-*"))


# The whole way


def test_everything_comes_from_the_new_place(made: Made, tmp_path: Path) -> None:
    python = unpack_archive(made.archive, str(tmp_path / "node ssd"))
    assert python == tmp_path / f"node ssd/hpctrain-{os.getuid()}/env-{made.header.digest[:16]}/bin/python"
    names = ", ".join(MODULES)
    code = f"import sys, {names}; print(sys.kept, *(sys.modules[n].__file__ for n in {MODULES}), sep='\\n')"
    kept, *files = run_python(python, code).splitlines()
    assert kept == "True"
    site = python.parent.parent / SITE
    assert [str(Path(file).relative_to(site)) for file in files] == [
        "plain/__init__.py",
        "by_path/__init__.py",
        "by_finder/__init__.py",
        "by_finder/deep.py",
        "single.py",
        "hpctrain/__init__.py",
    ]
    assert (site / "by_path" / "data.toml").read_text() == "x = 1"
    assert run_python(python, "import sys; print(sys.prefix)").strip() == str(python.parent.parent)


@pytest.mark.parametrize("name", ["short", "long", "absolute"])
def test_console_scripts_run_from_the_new_place(made: Made, tmp_path: Path, name: str) -> None:
    deep = tmp_path / "with space" / ("x" * 150)  # longer than `#!` takes
    bin_folder = unpack_archive(made.archive, str(deep)).parent
    (tmp_path / "link").symlink_to(bin_folder / name)
    for script in (bin_folder / name, tmp_path / "link"):
        done = subprocess.run([script, "a b"], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        assert done.stdout == "plain runs a b\n"


def test_links_and_what_is_left_out(made: Made, tmp_path: Path) -> None:
    root = unpack_archive(made.archive, str(tmp_path)).parent.parent
    assert os.readlink(root / "bin" / "absolute") == "short"
    assert not (root / "bin" / "outside").is_symlink()
    assert subprocess.check_output([root / "bin" / "outside"], text=True, timeout=DEADLINE_S) == "tool\n"
    assert os.readlink(root / SITE / "linked") == "plain"
    assert (root / "tools" / "one").is_file()
    absent = ("bin/nowhere", "bin/activate", "bin/Activate.ps1", SITE / "plain/.git", "loop", "tools/self")
    assert [name for name in absent if os.path.lexists(root / name)] == []
    for path in root.rglob("*"):
        assert path.resolve().is_relative_to(root) or path.parent == root / "bin"
    base = {os.readlink(root / name) for name in made.header.interpreter_links}
    assert base == {str(made.header.base_executable)}


def test_compiled_files_stay_valid(made: Made, tmp_path: Path) -> None:
    python = unpack_archive(made.archive, str(tmp_path))
    source = python.parent.parent / SITE / "plain" / "__init__.py"
    assert source.stat().st_mtime == int(made.mtime_s)
    compiled = next((source.parent / "__pycache__").glob("*.pyc"))
    before = compiled.stat()
    run_python(python, "import plain")
    assert compiled.stat().st_ino == before.st_ino  # Python would have replaced a stale one


def test_any_tar_can_read_it(made: Made, tmp_path: Path) -> None:
    subprocess.run(["tar", "-xzf", made.archive, "-C", tmp_path], check=True, timeout=DEADLINE_S)
    assert Header.model_validate_json((tmp_path / "hpctrain-env.json").read_text()) == made.header
    assert (tmp_path / SITE / "plain" / "__init__.py").is_file()


def test_an_unpacked_environment_can_be_archived_again(made: Made, tmp_path: Path) -> None:
    python = unpack_archive(made.archive, str(tmp_path / "a"))
    create_archive(tmp_path / "again.tar.gz", python.parent.parent)
    again = unpack_archive(tmp_path / "again.tar.gz", str(tmp_path / "b"))
    shutil.rmtree(tmp_path / "a")
    assert run_python(again, f"import {', '.join(MODULES)}; print('fine')") == "fine\n"


def test_the_same_environment_gives_the_same_digest(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    first, second = (create_archive(tmp_path / name, venv).header.digest for name in ("1.tar.gz", "2.tar.gz"))
    assert first == second
    write(venv / SITE / "new.py", "x = 1")
    assert create_archive(tmp_path / "3.tar.gz", venv).header.digest != first


# Unpacking again, at once, and after a kill


def start_unpack(archive: Path, directory: Path, on_progress: str) -> subprocess.Popen[str]:
    """A process that runs `on_progress` for each member, and then prints the path."""
    code = f"""
import os, signal, sys
from pathlib import Path
from hpctrain.launch.environment.unpack import unpack_archive
count = 0
def progress(done, total):
    global count
    count += 1
    {on_progress}
print(count > 0, unpack_archive(Path(sys.argv[1]), sys.argv[2], progress))
print(count > 0)
"""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, str(archive), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_second_time_nothing_is_done(made: Made, tmp_path: Path) -> None:
    seen: list[int] = []
    first = unpack_archive(made.archive, str(tmp_path), lambda done, total: seen.append(done))
    assert seen[-1] == made.header.total_bytes
    before = first.parent.parent.stat()
    again = unpack_archive(made.archive, str(tmp_path), lambda done, total: pytest.fail("unpacked again"))
    assert again == first
    assert again.parent.parent.stat() == before


def test_of_several_processes_one_unpacks(made: Made, tmp_path: Path) -> None:
    slow = "__import__('time').sleep(0.002)"  # the others are sure to find it at work
    processes = [start_unpack(made.archive, tmp_path, slow) for _ in range(4)]
    outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert sum(out.endswith("True\n") for out, _ in outputs) == 1
    assert len({out.split()[1] for out, _ in outputs}) == 1
    assert leftovers(tmp_path) == []


def test_killed_half_way_and_run_again(made: Made, tmp_path: Path) -> None:
    process = start_unpack(made.archive, tmp_path, "count == 40 and os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    assert len(leftovers(tmp_path)) == 1
    assert not list(tmp_path.rglob("env-*"))
    python = unpack_archive(made.archive, str(tmp_path))
    assert run_python(python, "import plain; print('fine')") == "fine\n"
    assert leftovers(tmp_path) == []


def test_waiting_has_a_deadline(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / f"hpctrain-{os.getuid()}"
    folder.mkdir(mode=0o700)
    with (folder / "env.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(HangError, match=r"unpacking in .* for 0\.3 s; find it"):
            unpack_archive(made.archive, str(tmp_path), lock_timeout_s=0.3)
    unpack_archive(made.archive, str(tmp_path), lock_timeout_s=0.3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=1m", "the environment needs"),
        # So many files that they do not fit, although their bytes would: found out in the middle.
        ("size=200m,nr_inodes=60", "No space left on device while unpacking"),
    ],
)
def test_a_full_disk(made: Made, tmp_path: Path, options: str, said: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"""
from pathlib import Path
from hpctrain.errors import StorageError
from hpctrain.launch.environment.unpack import unpack_archive
try:
    unpack_archive(Path({str(made.archive)!r}), {str(disk)!r})
except StorageError as error:
    print(error.errno, error)
print(sorted(path.name for path in Path({str(disk)!r}).rglob("*")))
"""
    out = in_mount_namespace(f'mount -t tmpfs -o {options} none "$0"', disk, script)
    message, left = out.strip().splitlines()
    assert message.startswith("[Errno 28]") or message.startswith("28 ")
    assert said in message
    assert "make room there" in message
    assert "partial-" not in left
    assert "env-" not in left


def in_mount_namespace(mount: str, disk: Path, script: str) -> str:
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` here to make a small disk with")
    rootless = [] if os.getuid() == 0 else ["--map-root-user"]
    command = ["unshare", *rootless, "--mount", "sh", "-c", f'{mount} || exit 77; exec "$@"']
    done = subprocess.run(
        [*command, str(disk), sys.executable, "-W", "error", "-c", script],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


# The node


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_executable": "/opt/gone/bin/python3"}, "not usable"),
        ({"python_version": "3.11.99"}, "to be Python 3.11.99"),
        ({"soabi": "cpython-311-riscv64-linux-gnu"}, "riscv64"),
        ({"base_executable": "/bin/false"}, "not usable"),
    ],
)
def test_a_node_without_the_interpreter(tmp_path: Path, change: dict[str, str], said: str) -> None:
    archive = craft(tmp_path / "a.tar.gz", [], **change)
    with pytest.raises(ConfigError, match="load the same Python module") as caught:
        unpack_archive(archive, str(tmp_path / "ssd"))
    assert said in str(caught.value)
    assert not (tmp_path / "ssd").exists()


def test_a_folder_that_others_may_write_to(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / f"hpctrain-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="with mode 0770; it must belong to"):
        unpack_archive(made.archive, str(tmp_path))
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match="is a link"):
        unpack_archive(made.archive, str(tmp_path))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_new_directories_are_private(made: Made, tmp_path: Path) -> None:
    root = unpack_archive(made.archive, str(tmp_path / "ssd")).parent.parent
    for path in (root, root.parent, root.parent.parent):
        assert path.stat().st_mode & 0o777 == 0o700


def test_the_directory_is_expanded_on_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SSD", "/local/my job")
    assert expand("$SSD/env") == Path("/local/my job/env")
    assert expand("~/env") == Path("/home/me/env")
    monkeypatch.delenv("SSD")
    for bad in ("$SSD/env", "${SSD}", "~nobody-of-that-name/x", ""):
        with pytest.raises(UsageError, match="is not set there"):
            expand(bad)


# Archives that are not what they should be


def craft(path: Path, content: list[tuple[tarfile.TarInfo, bytes]], **change: Any) -> Path:
    """An archive with any members, right in every other way."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for info, data in content:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    fields = {
        "python_version": sys.version.split()[0],
        "soabi": sysconfig.get_config_var("SOABI"),
        "base_executable": getattr(sys, "_base_executable", sys.executable),
        "interpreter_links": [],
        "prefix": "/old",
        "host": "login",
        "created_unix_s": 1,
        "hpctrain": "0",
        "members": len(content),
        "total_bytes": sum(len(data) for _, data in content),
        "digest": xxhash.xxh3_128_hexdigest(stream.getvalue()),
    }
    header = Header.model_validate({**fields, **change})
    path.write_bytes(encode_header(header) + gzip.compress(stream.getvalue()))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([(member("../evil"), b"x")], "points out of the archive"),
        ([(member("/tmp/evil"), b"x")], "points out of the archive"),
        ([(member("a/../../evil"), b"x")], "points out of the archive"),
        ([(member("a", tarfile.SYMTYPE, "/etc"), b"")], "leads out"),
        ([(member("a", tarfile.SYMTYPE, "../../x"), b"")], "leads out"),
        (
            [
                (member("d", tarfile.DIRTYPE), b""),
                (member("d/up", tarfile.SYMTYPE, ".."), b""),
                (member("out", tarfile.SYMTYPE, "d/up/.."), b""),
            ],
            "leads out",
        ),
        ([(member("a", tarfile.LNKTYPE, "/etc/passwd"), b"")], "neither a directory"),
        ([(member("a", tarfile.FIFOTYPE), b"")], "neither a directory"),
        ([(member("a", tarfile.CHRTYPE), b"")], "neither a directory"),
        ([(member("a"), b"x"), (member("a"), b"y")], "File exists"),
    ],
)
def test_hostile_members(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], said: str) -> None:
    archive = craft(tmp_path / "a.tar.gz", members)
    with pytest.raises(DataError, match="damaged") as caught:
        unpack_archive(archive, str(tmp_path / "ssd" / "deep"))
    assert said in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a.tar.gz", "env.lock"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    link = member("d", tarfile.SYMTYPE, str(tmp_path / "victim"))
    archive = craft(tmp_path / "a.tar.gz", [(link, b""), (member("d/evil"), b"x")])
    with pytest.raises(HpctrainError):
        unpack_archive(archive, str(tmp_path / "ssd"))
    assert list((tmp_path / "victim").iterdir()) == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"members": 1}, "more than the 1 members"),
        ({"total_bytes": 9}, "more than the 2 members and 9 bytes"),
        ({"members": 3}, "2 members and 10 bytes, but 3 and 10 are stated"),
        ({"total_bytes": 11}, "2 members and 10 bytes, but 2 and 11 are stated"),
        ({"digest": "1" * 32}, "11111 is stated"),
    ],
)
def test_what_the_header_states_is_held(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    members = [(member("a"), b"01234"), (member("b"), b"56789")]
    unpack_archive(craft(tmp_path / "fine.tar.gz", members), str(tmp_path / "ssd"))
    with pytest.raises(DataError, match=said):
        unpack_archive(craft(tmp_path / "a.tar.gz", members, **change), str(tmp_path / "other"))
    assert not list((tmp_path / "other").rglob("env-*"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    members = [
        (member("d", tarfile.DIRTYPE), b""),
        (member("d/a"), os.urandom(3000)),
        (member("b"), b"x" * 3000),
    ]
    return craft(tmp_path_factory.mktemp("small") / "a.tar.gz", members)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_is_noticed(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any changed byte, any cut: refused, or one of the few bytes that mean nothing (a date in a gzip header)."""
    content = bytearray(small.read_bytes())
    with small.open("rb") as file:
        read_header(file)
        start = file.tell()
    place = data.draw(st.integers(0, start - 1) | st.integers(start, len(content) - 1))
    if data.draw(st.booleans(), label="cut"):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    where = tmp_path_factory.mktemp("damaged")
    (where / "a.tar.gz").write_bytes(content)
    try:
        root = unpack_archive(where / "a.tar.gz", str(where / "damaged")).parent.parent
    except DataError:
        assert leftovers(where) == []
    else:
        assert tree(root) == tree(unpack_archive(small, str(where / "whole")).parent.parent)


@pytest.mark.parametrize("content", [b"", b"text", gzip.compress(b""), gzip.compress(bytes(20_000))])
def test_other_files_are_no_archives(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match="not an archive that this version"):
        unpack_archive(tmp_path / "x.tar.gz", str(tmp_path))


def test_a_missing_archive(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x.tar.gz: no such archive on .*hpctrain env-archive create"):
        unpack_archive(tmp_path / "x.tar.gz", str(tmp_path))
    with pytest.raises(StorageError, match=rf"^unpacking to /d: {tmp_path}: Is a directory; mend"):
        unpack_archive(tmp_path, "/d")


# Making one


def test_only_a_virtual_environment_can_be_archived(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no pyvenv\.cfg.*python -m venv ENV"):
        create_archive(tmp_path / "a.tar.gz", Path(sys.base_prefix))
    venv = make_venv(tmp_path / "venv")
    (venv / "bin" / "python").unlink()
    with pytest.raises(ConfigError, match="does not work"):
        create_archive(tmp_path / "a.tar.gz", venv)
    assert not (tmp_path / "a.tar.gz").exists()


def test_an_archive_is_not_put_into_itself(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    with pytest.raises(UsageError, match="lies in the environment"):
        create_archive(venv / "env.tar.gz", venv)


def test_an_editable_package_that_cannot_be_found(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    add_editable(venv, "strange", "import os\n")
    with pytest.raises(ConfigError, match=r"strange is installed in editable mode.*without -e"):
        create_archive(tmp_path / "a.tar.gz", venv)


def test_packages_of_the_base_are_warned_of(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    config = venv / "pyvenv.cfg"
    config.write_text(config.read_text().replace("packages = false", "packages = true"))
    assert "not in the archive" in " ".join(create_archive(tmp_path / "a.tar.gz", venv).warnings)


def test_the_root_of_a_project_on_the_path(tmp_path: Path) -> None:
    """Its packages go in, and not its data; in a directory of sources, packages without __init__.py do too."""
    venv, project = make_venv(tmp_path / "venv"), tmp_path / "project"
    write(project / "pyproject.toml")
    write(project / "real" / "__init__.py")
    write(project / "data" / "script.py")
    write(project / "real.egg-info" / "PKG-INFO")
    write(tmp_path / "src" / "spaces" / "inner" / "__init__.py")
    write(venv / SITE / "dev.pth", f"# comment\n{project}\n{tmp_path / 'src'}\n/not/there\n")
    create_archive(tmp_path / "a.tar.gz", venv)
    site = unpack_archive(tmp_path / "a.tar.gz", str(tmp_path / "ssd")).parent.parent / SITE
    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert {"real/__init__.py", "real.egg-info/PKG-INFO", "spaces/inner/__init__.py"} <= found
    assert not any(name.startswith("data") for name in found)
    assert (site / "dev.pth").read_text() == "# comment\n"


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    write(tmp_path / "out" / "env.tar.gz", "old")
    old, new = (write(tmp_path / "out" / f".env.tar.gz.partial-1-{name}") for name in ("old", "new"))
    os.utime(old, (time.time() - 100_000,) * 2)

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_archive(tmp_path / "out" / "env.tar.gz", venv, fail)
    assert sorted((tmp_path / "out").iterdir()) == [new, tmp_path / "out" / "env.tar.gz"]
    assert (tmp_path / "out" / "env.tar.gz").read_text() == "old"
    with pytest.raises(UsageError, match=f"there is no directory {tmp_path}/no folder: make it"):
        create_archive(tmp_path / "no folder" / "env.tar.gz", venv)


def test_a_full_disk_while_archiving(tmp_path: Path) -> None:
    venv, disk = make_venv(tmp_path / "venv"), tmp_path / "disk"
    (venv / SITE / "big.bin").write_bytes(os.urandom(4 << 20))
    disk.mkdir()
    script = f"""
from pathlib import Path
from hpctrain.errors import StorageError
from hpctrain.launch.environment.archive import create_archive
try:
    create_archive(Path({str(disk / "a.tar.gz")!r}), Path({str(venv)!r}))
except StorageError as error:
    print(error)
print(list(Path({str(disk)!r}).iterdir()))
"""
    out = in_mount_namespace('mount -t tmpfs -o size=1m none "$0"', disk, script)
    assert "No space left on device; nothing is left behind" in out
    assert out.endswith("\n[]\n")


# The parts


class NamedBytes(io.BytesIO):
    name = "x.tar.gz"


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=500),
    st.integers(0, 1 << 60),
)
def test_headers_have_one_length(prefix: str, number: int) -> None:
    header = Header(
        python_version="3.12.1",
        soabi="x",
        base_executable=Path("/usr/bin/python3"),
        interpreter_links=["bin/python"],
        prefix=Path(prefix),
        host="h",
        created_unix_s=7,
        hpctrain="0",
        total_bytes=number,
    )
    encoded = encode_header(header)
    assert len(encoded) == len(encode_header(header.model_copy(update={"prefix": Path("/"), "members": 3})))
    file = NamedBytes(encoded + b"rest")
    assert read_header(file) == header
    assert file.read() == b"rest"


def mended(name: str, content: bytes, prefix: Path = Path("/old env")) -> bytes | None:
    return Mender(prefix, (str(SITE),)).content(name, io.BytesIO(content))


@pytest.mark.parametrize(
    ("head", "arguments"),
    [
        ("#!/old env/bin/python\n", ""),
        ("#!/old env/bin/python3.12 -E -s\n", " -E -s"),
        ("#!/bin/sh\n'''exec' \"/old env/bin/python3\" \"$0\" \"$@\"\n' '''\n", ""),
        ("#!/bin/sh\n'''exec' '/old env/bin/python3' \"$0\" \"$@\"\n' '''\n", ""),
        ("#!/bin/sh\n'''exec' /old env/bin/python3 -I \"$0\" \"$@\"\n' '''\n", " -I"),
    ],
)
def test_first_lines_are_rewritten(head: str, arguments: str) -> None:
    changed = mended("bin/x", head.encode() + b"body\n")
    assert changed is not None
    assert changed.startswith(b"#!/bin/sh\n'''exec' ")
    assert changed.endswith(f'/python"{arguments} "$0" "$@"\n\' \'\'\'\nbody\n'.encode())
    assert b"old env" not in changed


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bin/x", b"#!/usr/bin/env python3\n"),
        ("bin/x", b"#!/usr/bin/python3\n"),
        ("bin/x", b"#!/bin/sh\necho /old env/bin/python\n"),
        ("bin/x", b""),
        ("share/x", b"#!/old env/bin/python\n"),
        (f"{SITE}/deep/x.pth", b"/elsewhere\n"),
        (f"{SITE}/x.so", b"\x7fELF\x02\x01"),  # cut short
    ],
)
def test_other_files_stay_as_they_are(name: str, content: bytes) -> None:
    assert mended(name, content) is None


def make_elf(search_path: bytes, tag: int = 29) -> bytes:
    """The least that has a library search path: a header, two segments, a dynamic section, its strings."""
    strings = b"\0" + search_path + b"\0after\0"
    dynamic = struct.pack("<qQqQqQ", 5, 0x1000 + 64 + 2 * 56 + 48, tag, 1, 0, 0)
    body = dynamic + strings
    start = 64 + 2 * 56
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0x1000, 0, start + len(body), start + len(body), 1)
    section = struct.pack("<IIQQQQQQ", 2, 4, start, 0x1000 + start, 0, len(dynamic), len(dynamic), 8)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    return header + load + section + body


@pytest.mark.parametrize("tag", [15, 29])
def test_search_paths_of_libraries_become_relative(tag: int) -> None:
    old = f"/old env/lib:/opt/mpi/lib:/old env/{SITE}/torch/lib".encode()
    changed = mended(f"{SITE}/horovod/torch/x.so", make_elf(old, tag))
    assert changed is not None
    new = b"$ORIGIN/../../../..:/opt/mpi/lib:$ORIGIN/../../torch/lib"
    assert changed == make_elf(old, tag).replace(old, new.ljust(len(old), b"\0"))
    assert mended(f"{SITE}/x.so", make_elf(b"$ORIGIN/../lib:/old environment/lib")) is None


def test_a_search_path_without_room() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        mended(f"{SITE}/x/y/z.so", make_elf(b"/v/lib"), Path("/v"))


def test_what_an_environment_says_of_itself(tmp_path: Path) -> None:
    found = probe_environment(make_venv(tmp_path / "venv"))
    assert found.prefix == tmp_path / "venv"
    assert found.sites == [tmp_path / "venv" / SITE]
    assert (found.python_version, found.has_hpctrain) == (sys.version.split()[0], False)
    assert found.base_executable.resolve() == Path(getattr(sys, "_base_executable", "")).resolve()


# The command line


def command_line(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", COMMAND_LINE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SSD": "/dev/null"},
    )


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    return make_venv(tmp_path / "venv")


def test_create_and_unpack(venv: Path, tmp_path: Path) -> None:
    done = command_line("create", tmp_path / "env.tar.gz", "--prefix", venv)
    assert done.returncode == 0, done.stderr
    assert "digest" in done.stdout
    assert done.stderr == ""
    done = command_line("unpack", tmp_path / "env.tar.gz", tmp_path / "ssd")
    assert done.stderr == ""
    python = Path(done.stdout.removesuffix("\n"))  # the path and nothing else
    version = run_python(python, "import hpctrain; print(hpctrain.__version__)").strip()
    assert version == hpctrain.__version__
    done = command_line("unpack", tmp_path / "env.tar.gz", "$SSD/x")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("StorageError: ")


@pytest.mark.parametrize("verb", ["create", "unpack"])
def test_help_has_an_example(verb: str) -> None:
    done = command_line(verb, "--help")
    assert done.returncode == 0
    assert "Example:" in done.stdout
