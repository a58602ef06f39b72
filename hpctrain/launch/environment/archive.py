"""A Python environment as one archive, to be unpacked on the SSD of each node (`hpctrain.launch.environment.unpack`).

A thousand ranks that import thousands of small files from a parallel filesystem keep its metadata servers busy for
minutes; one large file per node is what such a filesystem is good at. The archive depends on nothing but the base
interpreter: the files that name the old place are rewritten (`hpctrain.launch.environment.mend`), and editable packages
go in as real ones (`hpctrain.launch.environment.contents`).
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import secrets
import socket
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

import xxhash
from isal import igzip_threaded

import hpctrain
from hpctrain.durable import fsync_path
from hpctrain.errors import StorageError, UsageError
from hpctrain.launch.environment.contents import (
    Contents,
    Entry,
    Environment,
    list_contents,
    probe_environment,
    site_names,
)
from hpctrain.launch.environment.extract import Progress
from hpctrain.launch.environment.header import Header, encode_header
from hpctrain.launch.environment.mend import Mender

_COPY_BYTES = 1 << 20
_FORGOTTEN_S = 86_400.0


@dataclass(frozen=True)
class Archived:
    """What `create_archive` made: its header, the size of the archive, and what the user should know."""

    header: Header
    archive_bytes: int
    warnings: list[str]


def create_archive(out: Path, prefix: Path, progress: Progress = lambda done, total: None) -> Archived:
    """Write the virtual environment at `prefix` to `out`, compressed on all cores, whole or not at all.

    Raises:
        ConfigError: `prefix` is no virtual environment that can be moved.
        StorageError: a file cannot be read, or the archive cannot be written.
        UsageError: `out` lies inside the environment, or in no directory.
    """
    environment = probe_environment(prefix.absolute())
    if out.resolve().is_relative_to(environment.prefix.resolve()):
        raise UsageError(
            f"{out} lies in the environment that it is to hold; choose a place outside of {prefix}"
        )
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: there is no directory {out.parent}: make it")
    contents = list_contents(environment)
    header = _make_header(environment, contents)
    mender = Mender(environment.prefix, tuple(site_names(environment)))
    with _publishing(out.absolute()) as file:
        file.write(encode_header(header))
        with _Sink(file) as sink:
            total_bytes = _write_members(sink, contents, mender, progress)
        header = header.model_copy(
            update={"members": len(contents.entries), "total_bytes": total_bytes, "digest": sink.digest()}
        )
        file.seek(0)
        file.write(encode_header(header))
    return Archived(header, out.stat().st_size, contents.warnings)


def _make_header(environment: Environment, contents: Contents) -> Header:
    """All but what is known at the end."""
    return Header(
        python_version=environment.python_version,
        soabi=environment.soabi,
        base_executable=environment.base_executable,
        interpreter_links=contents.interpreter_links,
        prefix=environment.prefix,
        host=socket.gethostname(),
        created_unix_s=int(time.time()),
        hpctrain=hpctrain.__version__,
    )


class _Sink:
    """Takes a tar stream: digests it, compresses it, and writes it to `file`, which stays open."""

    def __init__(self, file: BinaryIO) -> None:
        self._hash = xxhash.xxh3_128()
        self._stream = igzip_threaded.open(file, "wb", threads=-1)  # type: ignore[no-untyped-call]

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._stream.write(data)
        return len(data)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _write_members(sink: _Sink, contents: Contents, mender: Mender, progress: Progress) -> int:
    """Write all members in the order of their names; returns the bytes of all files."""
    expected_bytes = sum(each.status.st_size for each in contents.entries.values() if each.kind == "file")
    done_bytes = 0
    with tarfile.open(
        fileobj=cast("IO[bytes]", sink),  # all that it asks for in this mode is `write`
        mode="w|",
        bufsize=_COPY_BYTES,
        format=tarfile.PAX_FORMAT,
    ) as tar:
        for _, entry in sorted(contents.entries.items()):
            done_bytes += _write_member(tar, entry, mender)
            progress(min(done_bytes, expected_bytes), expected_bytes)
    return done_bytes


def _write_member(tar: tarfile.TarFile, entry: Entry, mender: Mender) -> int:
    """Write one member; returns its bytes. Who owns it is not kept, nor what others may do with it."""
    info = tarfile.TarInfo(entry.name)
    info.mtime = int(entry.status.st_mtime)  # whole seconds, which is what a .pyc is compared with
    info.mode = 0o755 if entry.kind != "file" or entry.status.st_mode & 0o111 else 0o644
    if entry.kind != "file":
        info.type = tarfile.DIRTYPE if entry.kind == "directory" else tarfile.SYMTYPE
        info.linkname = entry.target
        tar.addfile(info)
        return 0
    with entry.source.open("rb") as file:
        content = mender.content(entry.name, file)
        info.size = os.fstat(file.fileno()).st_size if content is None else len(content)
        tar.addfile(info, file if content is None else io.BytesIO(content))
    return info.size


@contextlib.contextmanager
def _publishing(out: Path) -> Iterator[BinaryIO]:
    """Give a file to write; when the block ends it is made durable and renamed to `out`."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        _sweep(out)
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, out)
        fsync_path(out.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(
                error.errno,
                f"{out}: not made, because of {error.filename or out}: {error.strerror or error}; nothing is left "
                "behind: mend that and run again",
            ) from error
        raise


def _sweep(out: Path) -> None:
    """Remove what killed processes left; their hosts cannot be asked, so only after a day."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _FORGOTTEN_S:
                path.unlink()
