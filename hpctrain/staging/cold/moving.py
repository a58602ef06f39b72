"""The steps of a move between tiers (`staging.cold`): copy or pack, check the copy, remove the original."""

from __future__ import annotations

import contextlib
import filecmp
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hpctrain.durable import fsync_path
from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.encoding import Encoder
from hpctrain.h5.layout import chunk_pipeline, plan_layout
from hpctrain.h5.manifest import MANIFEST, read_manifest
from hpctrain.h5.options import AUTO
from hpctrain.h5.pack import Watch, pack
from hpctrain.h5.packed_source import PackedSource
from hpctrain.h5.publish import check_target
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.cold.archived import options_like
from hpctrain.staging.cold.content import Advance, ContentSource
from hpctrain.staging.cold.copying import FAULT, FileKeys, Show, copy_files, forget_cached, keys_of, named
from hpctrain.staging.verify.findings import VerifyReport
from hpctrain.staging.verify.verification import verify_set

_MAX_FINDINGS: Final = 10
_SAMPLED_CHUNKS: Final = 8
_PACKING: Final = "packing"  # within the hidden folder, so that what a kill leaves is removed with it

Manifest = Mapping[str, Any]


def copy_set(source: Path, paths: Sequence[Path], extras: Sequence[Path], copy: Path, show: Show) -> None:
    """Copy the files of a set, and check the copy; errors as for `check_copy`."""
    copy_files(paths, copy, show)
    forget_cached(copy)
    check_copy(source, extras, copy, show)


def check_copy(
    source: Path, extras: Sequence[Path], copy: Path, show: Show, mend: str = "check that disk"
) -> None:
    """Check every chunk of the copy of a set, and compare `extras`, which have no digests, byte for byte.

    `mend` is what to do when the copy is damaged, before it is run again.

    Raises `DataError`, with names, where the original is damaged, and `StorageError` where only the copy is.
    """
    report = verify_set(copy, progress=lambda done, total: show("check", done, total))
    if not report.sound:
        blame(source)
        raise StorageError(
            f"{_names(report)}\nthe copy in {copy.parent} is damaged, but {source} is not, which stays; {mend}, and "
            "run it again"
        )
    for path in extras:
        with named(path, "compared with its copy"):
            other = copy / path.name
            if not (other.is_file() and filecmp.cmp(path, other, shallow=False)):
                raise StorageError(f"{path}: {other} is not a copy of it; {mend}, and run it again")


def blame(root: Path) -> None:
    """Raise `DataError`, with names, where a set is damaged."""
    report = verify_set(root)
    if not report.sound:
        raise DataError(
            f"{_names(report)}\n{root} is damaged and stays where it is; mend it from a backup with "
            f"`hpctrain restore STORE --repair {root}`, or pack the source again"
        )


def _names(report: VerifyReport) -> str:
    lines = [str(finding) for finding in report.findings[:_MAX_FINDINGS]]
    if len(report.findings) > _MAX_FINDINGS:
        lines.append(f"and {len(report.findings) - _MAX_FINDINGS} more: `hpctrain verify` names all")
    return "\n".join(lines)


def repack_set(
    source: Path, original: Manifest, codec: str, copy: Path, extras: Sequence[Path], show: Show
) -> tuple[str, str]:
    """Pack a set again, with the chunks and shards of `original`; `extras` are files to copy beside it.

    Gives the codec and the content digest, which is that of both: what was packed is read back from the disk. Errors as
    for `check_copy` and `pack`.
    """
    chunk_samples, raw_bytes = int(original["chunk_samples"]), int(original["raw_bytes"])
    with _blaming(source):
        content = ContentSource(PackedSource(source), chunk_samples)
        report = pack(
            content,
            copy / _PACKING,
            options_like(content, original, codec),
            Watch(lambda done, total, packed_bytes: show("pack", packed_bytes, raw_bytes)),
        )
    with named(copy, "written to"):
        for path in sorted((copy / _PACKING).iterdir()):
            fault_point(FAULT)
            path.rename(copy / path.name)
        (copy / _PACKING).rmdir()
    copy_files(extras, copy, show)
    forget_cached(copy)
    digest = content.digest()
    found = _read_back(copy, chunk_samples, raw_bytes, show)
    if found != digest:
        raise StorageError(
            f"{copy.parent}: what was packed has the content digest {found}, but {source} has {digest} and stays; "
            "check memory and disk, and run it again"
        )
    return report.codec, digest


@contextlib.contextmanager
def _blaming(root: Path) -> Iterator[None]:
    """Name all that is damaged in a set, and not only what was met first."""
    try:
        yield
    except DataError:
        blame(root)
        raise


def estimated_bytes(root: Path, original: Manifest, codec: str) -> int:
    """About what `repack_set` will write, from chunks spread over the set; 0 where the codec is yet to be chosen."""
    with _blaming(root):
        source = PackedSource(root)
        options = options_like(source, original, codec)
        if codec == AUTO:
            return 0
        layout = plan_layout(source, options)
        encoder = Encoder(source, layout)
        starts = range(0, layout.num_samples, layout.chunk_samples)
        rows = stored_bytes = 0
        for start in starts[:: -(-len(starts) // _SAMPLED_CHUNKS)]:
            chunk = encoder.encode(start)
            rows += chunk.rows
            stored_bytes += sum(map(len, chunk.dense.values()))
            for name, ragged in chunk.ragged.items():
                values = ragged.values[ragged.offsets[0] : ragged.offsets[-1]]
                pipeline = chunk_pipeline(layout.fields[name], (max(len(values), 1),))
                stored_bytes += len(pipeline.encode(values)) if len(values) else 0
    return stored_bytes * layout.num_samples // rows


def _read_back(copy: Path, chunk_samples: int, raw_bytes: int, show: Show) -> str:
    """The content digest of a fresh copy. All its chunks are read for that, and their digests compared."""

    def advance(done: int, total: int) -> None:
        show("check", raw_bytes * done // total, raw_bytes)

    try:
        return content_digest(copy, chunk_samples, advance)
    except DataError as error:
        raise StorageError(
            f"{error}\nthe copy in {copy.parent} is damaged; check that disk, and run it again"
        ) from error


def content_digest(root: Path, chunk_samples: int, advance: Advance | None = None) -> str:
    """That of a packed set; raises `DataError` for a damaged chunk, and `StorageError`."""
    return ContentSource(PackedSource(root), chunk_samples).digest(advance)


def check_free(target: Path) -> None:
    """Raise `UsageError` for a place that is taken."""
    if os.path.lexists(target / MANIFEST):
        raise UsageError(f"{target} exists already, as another set; remove it, or choose another place")
    check_target(target, MANIFEST, overwrite=False)


def check_space(target: Path, needed_bytes: int) -> None:
    """Raise `StorageError` where less is free than is needed."""
    with named(target.parent, "asked for its free space"):
        found = os.statvfs(_existing(target.parent))
    free_bytes = found.f_bavail * found.f_frsize
    if found.f_blocks and free_bytes < needed_bytes:  # some filesystems do not count
        raise StorageError(
            f"{target.parent}: {needed_bytes} bytes are needed, {free_bytes} are free; nothing was written; make room, "
            "choose another place, or a stronger --codec"
        )


def _existing(path: Path) -> Path:
    return path if path.exists() or path == path.parent else _existing(path.parent)


def remove_set(root: Path, identity: str, keys: FileKeys) -> None:
    """Remove a set of which there is a copy: rename it to a hidden name, which says what it is, and delete that.

    Raises `StorageError`, and removes nothing, where it is not the set with this identity any more, or the files are
    not those with these `keys`: what was added or changed is in no copy.
    """
    hidden = root.with_name(f".{root.name}.removed-{identity}")
    with named(root, "removed"):
        fault_point(FAULT)
        root.rename(hidden)
        fsync_path(root.parent)
        if _identity_of(hidden) != identity or not _has(hidden, keys):
            hidden.rename(root)
            raise StorageError(
                f"{root}: became another set or was changed while it was copied; it stays; run it again"
            )
        _delete(hidden)


def _has(root: Path, keys: FileKeys) -> bool:
    try:
        return keys_of(root) == keys
    except UsageError:  # a folder, since
        return False


def finish_removal(root: Path) -> bool:
    """Deal with what a killed `remove_set` left of this name; whether a removal was ended. Raises `StorageError`.

    A set that is whole gets its name back: its copy is to be checked again, for who knows what became of that.
    """
    if not root.parent.is_dir():
        return False
    finished = False
    pattern = re.compile(rf"\.{re.escape(root.name)}\.removed-([0-9a-f]+)")
    with named(root.parent, "cleaned up"):
        for hidden in sorted(root.parent.iterdir()):
            match = pattern.fullmatch(hidden.name)
            if match is None:
                continue
            identity = _identity_of(hidden)
            if identity == match[1] and not os.path.lexists(root):
                fault_point(FAULT)
                hidden.rename(root)
                fsync_path(root.parent)
            # The manifest is deleted first, and only of the right set: without one, the rest is to go.
            elif identity in (None, match[1]):
                _delete(hidden)
                finished = True
    return finished


def _identity_of(root: Path) -> str | None:
    """The identity of a set; None where there is no manifest."""
    if not os.path.lexists(root / MANIFEST):
        return None
    try:
        return str(read_manifest(root)["identity"])
    except DataError:
        return ""


def _delete(hidden: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process may be at it, too
        for path in sorted(hidden.iterdir(), key=lambda path: (path.name != MANIFEST, path.name)):
            fault_point(FAULT)
            path.unlink(missing_ok=True)
        fault_point(FAULT)
        hidden.rmdir()
    fsync_path(hidden.parent)
