"""What goes into an environment archive: every file of a virtual environment, and editable packages as real ones.

Compiled `.pyc` files go along, and all modification times are kept, because Python compares those of the sources:
without them each node would compile thousands of modules again.
"""

from __future__ import annotations

import json
import os
import pkgutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

import hpctrain
from hpctrain.errors import ConfigError, StorageError

_PROBE_TIMEOUT_S = 120.0
_LEFT_OUT = {".git", ".hg", ".svn", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


class Editable(BaseModel):
    """A package installed in editable mode: the .pth files that lead to it, and where its modules are."""

    name: str
    pth_files: list[Path]
    modules: dict[str, list[Path]]


class Environment(BaseModel):
    """A virtual environment, as its own interpreter tells it (`hpctrain.launch.environment.probe`)."""

    python_version: str
    soabi: str
    prefix: Path
    base_prefix: Path
    base_executable: Path
    sites: list[Path]
    has_hpctrain: bool
    editable: list[Editable]


@dataclass(frozen=True)
class Entry:
    """One member of the archive: a directory, a file, or a link with its (relative) `target`."""

    name: str
    kind: Literal["directory", "file", "link"]
    source: Path
    status: os.stat_result
    target: str = ""


@dataclass
class Contents:
    """All members by name, and the names in `bin` that lead to the base interpreter: links to be made anew."""

    entries: dict[str, Entry] = field(default_factory=dict)
    interpreter_links: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Add a member unless there is one of that name: what is found first is what Python imports."""
        self.entries.setdefault(entry.name, entry)


def probe_environment(prefix: Path) -> Environment:
    """Ask the interpreter of a virtual environment about it.

    Raises:
        ConfigError: `prefix` is no virtual environment, or its interpreter does not run.
    """
    if not (prefix / "pyvenv.cfg").is_file():
        raise ConfigError(
            f"{prefix} is no virtual environment (there is no pyvenv.cfg), and nothing else can be moved; make one "
            "with `python -m venv ENV`, install there, and name it by --prefix ENV"
        )
    command = [str(prefix / "bin" / "python"), "-I", str(Path(__file__).with_name("probe.py"))]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise ConfigError(
            f"{command[0]} does not work: {said}; mend that environment, or name another by --prefix"
        ) from error
    return Environment.model_validate(answer)


def list_contents(environment: Environment) -> Contents:
    """All that is to be archived.

    Raises:
        ConfigError: the files of an editable package cannot be found.
        StorageError: a directory cannot be read.
    """
    contents = Contents()
    try:
        _add_prefix(contents, environment)
        _add_editable(contents, environment)
        settings = (environment.prefix / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{error.filename}: cannot be read: {error.strerror}; check its permissions"
        ) from error
    if "include-system-site-packages=true" in settings.lower().replace(" ", ""):
        contents.warnings.append(
            f"the environment also sees the packages of {environment.base_prefix}; those are not in the archive"
        )
    return contents


def site_names(environment: Environment) -> list[str]:
    """The package directories, relative to the prefix; `lib64` is mostly a link to `lib`."""
    prefix = environment.prefix.resolve()
    return sorted({site.resolve().relative_to(prefix).as_posix() for site in environment.sites})


def _add_prefix(contents: Contents, environment: Environment) -> None:
    base = environment.base_executable.resolve()
    dropped = {path.resolve() for each in environment.editable for path in each.pth_files}
    root = environment.prefix.resolve()
    for entry in _walk(root, "", root):
        if entry.name.lower().startswith("bin/activate"):
            continue  # these put the old place on PATH
        if entry.kind == "file" and _is_interpreter(entry, base):
            contents.interpreter_links.append(entry.name)
            continue
        if entry.source.suffix != ".pth" or entry.source.resolve() not in dropped:
            contents.add(entry)


def _is_interpreter(entry: Entry, base: Path) -> bool:
    """Whether it is a link in `bin` to the base interpreter, and not a copy of that."""
    return entry.name.startswith("bin/") and entry.source.is_symlink() and entry.source.resolve() == base


def _add_editable(contents: Contents, environment: Environment) -> None:
    """Put packages that lie elsewhere where pip would have put them."""
    sites = [site.resolve() for site in environment.sites]
    found: list[tuple[str, Path]] = []
    led: dict[Path, list[tuple[str, Path]]] = {}
    for pth in sorted(path for site in sites for path in site.glob("*.pth")):
        led[pth] = [item for folder in _outside_folders(pth, sites) for item in _importable(folder)]
        found += led[pth]
    for each in environment.editable:
        located = [(name, path.resolve()) for name, paths in each.modules.items() for path in paths]
        files = [path.resolve() for path in each.pth_files if path.exists()]
        if files and not located and not any(led.get(path) for path in files):
            raise ConfigError(
                f"{each.name} is installed in editable mode, in a way that does not tell where its files are; install "
                "it without -e (`pip install PATH`)"
            )
        found += [(name, path) for name, path in located if not _is_inside(path, sites)]
    if not environment.has_hpctrain:
        found.append(("hpctrain", Path(hpctrain.__file__).resolve().parent))
    for name, path in found:
        _add_tree(contents, f"{site_names(environment)[0]}/{name}", path)


def _add_tree(contents: Contents, name: str, path: Path) -> None:
    if path.is_file():
        contents.add(Entry(f"{name.rpartition('/')[0]}/{path.name}", "file", path, path.stat()))
        return
    contents.add(Entry(name, "directory", path, path.stat()))
    for entry in _walk(path, f"{name}/", path):
        contents.add(entry)


def _outside_folders(pth: Path, sites: list[Path]) -> Iterator[Path]:
    """Directories that a .pth file adds to the path from outside of the package directories."""
    for line in pth.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        if line.strip() and not line.startswith(("#", "import ", "import\t")):
            folder = (pth.parent / line.strip()).resolve()
            if folder.is_dir() and not _is_inside(folder, sites):
                yield folder


def _importable(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names that can be imported from a directory, with their files, and the metadata beside them.

    A package without `__init__.py` counts unless this is the root of a project, where any directory would be one.
    """
    for module in pkgutil.iter_modules([str(folder)]):
        package = folder / module.name
        files = [package] if module.ispkg else sorted(folder.glob(f"{module.name}.*"))
        yield from ((module.name, file) for file in files if module.ispkg or file.suffix in (".py", ".so"))
    is_project = any((folder / name).exists() for name in _PROJECT_FILES)
    for path in sorted(folder.iterdir()):
        is_namespace = path.name.isidentifier() and not is_project and not (path / "__init__.py").exists()
        if path.is_dir() and (is_namespace or path.suffix in (".egg-info", ".dist-info")):
            yield path.name, path


def _is_inside(path: Path, folders: list[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _walk(folder: Path, prefix: str, root: Path, above: tuple[Path, ...] = ()) -> Iterator[Entry]:
    """Members below a directory. Links that stay below `root` remain links; others are followed."""
    for item in sorted(os.scandir(folder), key=lambda item: item.name):
        path, name = Path(item.path), prefix + item.name
        if item.name in _LEFT_OUT:
            continue
        if item.is_symlink() and (target := _inner_target(path, root)):
            yield Entry(name, "link", path, item.stat(follow_symlinks=False), target)
            continue
        try:
            status = item.stat()
        except FileNotFoundError:
            continue  # a link to nothing
        if stat.S_ISREG(status.st_mode):
            yield Entry(name, "file", path, status)
        elif stat.S_ISDIR(status.st_mode) and not (path / "pyvenv.cfg").exists():
            real = path.resolve()
            if real not in above and not root.is_relative_to(real):  # a link to what it lies in never ends
                yield Entry(name, "directory", path, status)
                yield from _walk(path, f"{name}/", root, (*above, real))


def _inner_target(link: Path, root: Path) -> str:
    """The target of a link relative to its place; empty if that is not below `root`."""
    target = link.parent / os.readlink(link)
    target = target.parent.resolve() / target.name
    return os.path.relpath(target, link.parent.resolve()) if target.is_relative_to(root) else ""
