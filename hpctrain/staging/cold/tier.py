"""The cold tier: packed sets are moved to an archive directory and back, recompressed on the way if asked.

A move is a copy, a check of the copy, and only then a removal. A kill at any moment leaves the set whole in one place
at least, and nothing half done under its name:

1. The copy is made in a hidden folder beside its place, read back from the disk, and every chunk of it checked.
2. One rename publishes it (`h5.publish`).
3. The original is renamed to a hidden name that holds its identity, and deleted file by file.

The same command, run again, goes on from there: what a killed copy left is removed, a copy that was published is
checked again and not made again, and a removal that was begun is ended: of a set that is still whole only after that
check.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.manifest import MANIFEST, read_manifest
from hpctrain.h5.publish import publishing
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.cold import moving
from hpctrain.staging.cold.archived import SIDECAR, Archived, Found, codec_of, encoder_versions, read_sidecar
from hpctrain.staging.cold.copying import FAULT, Show, named


@dataclass(frozen=True)
class Moved:
    """What came of a move.

    Attributes:
        source: where the set was.
        target: where it is now.
        identity: of the set there.
        codec: of the set there.
        source_bytes: of the files that were moved; 0 where an earlier run had removed them.
        target_bytes: of what they became.
        removed: whether nothing is at `source` any more.
        went_on: whether an earlier run had made the copy.
        warnings: what the user should know.
    """

    source: Path
    target: Path
    identity: str
    codec: str
    source_bytes: int
    target_bytes: int
    removed: bool
    went_on: bool = False
    warnings: tuple[str, ...] = ()


def archive_set(
    source: Path, cold_dir: Path, codec: str | None = None, keep: bool = False, show: Show | None = None
) -> Moved:
    """Move a packed set into an archive directory, under its own name.

    `codec`: pack it with that on the way; `archived.json` says then what it was. `keep`: leave it where it is, too.
    Raises `UsageError` for paths that cannot be used; `DataError`, naming chunks, for a set that is damaged or is no
    packed set; `StorageError` where reading or writing fails or there is no room. Then nothing was removed, and nothing
    is left behind.
    """
    source, show = _absolute(source), show or _silent
    target = _absolute(cold_dir) / source.name
    if not target.parent.is_dir():
        raise UsageError(f"{cold_dir}: there is no such folder; make it, or mount the archive")
    _prepare(source, target)
    if not os.path.lexists(source):
        return _archived_before(source, target)
    found = Found.at(source)
    if found.sidecar is not None:
        raise UsageError(f"{source} lies in an archive already ({SIDECAR} is there); recall it first")
    before = read_sidecar(target)
    went_on = before is not None and before.manifest == found.manifest
    if went_on:
        moving.check_copy(source, found.extras, target, show, f"remove {target}")
    else:
        _archive(found, target, codec, show)
    return _ended(found, target, keep, went_on)


def _archive(found: Found, target: Path, codec: str | None, show: Show) -> None:
    moving.check_free(target)
    moving.check_space(target, _needed_bytes(found, codec))
    with publishing(target, MANIFEST, point=FAULT) as partial:
        packed_codec, digest = None, None
        if codec is None:
            moving.copy_set(found.root, found.paths, found.extras, partial, show)
        else:
            packed_codec, digest = moving.repack_set(
                found.root, found.manifest, codec, partial, found.extras, show
            )
        sidecar = Archived(str(found.root), found.manifest, packed_codec, digest, encoder_versions())
        _write(partial / SIDECAR, sidecar.to_bytes())


def recall_set(
    archived: Path, target: Path, codec: str | None = None, keep: bool = False, show: Show | None = None
) -> Moved:
    """Move an archived set back.

    Without `codec` it becomes what it was before it was archived, with the same identity; where that cannot be had, a
    warning says so, and the archive stays. `keep`: leave it there in any case. Errors as for `archive_set`.
    """
    archived, target, show = _absolute(archived), _absolute(target), show or _silent
    ended = _prepare(archived, target)
    if not os.path.lexists(archived):
        if ended and os.path.lexists(target / MANIFEST):
            return _moved_before(archived, target)
        there = f"; {target} is there, perhaps it was recalled before" if os.path.lexists(target) else ""
        raise UsageError(f"{archived}: there is no such archived set{there}")
    found = Found.at(archived)
    warnings: tuple[str, ...] = ()
    went_on = _is_recalled(found, target, codec)
    if went_on:
        moving.check_copy(archived, found.extras, target, show, f"remove {target}")
    else:
        warnings = _recall(found, target, codec, show)
    return replace(_ended(found, target, keep or bool(warnings), went_on), warnings=warnings)


def _recall(found: Found, target: Path, codec: str | None, show: Show) -> tuple[str, ...]:
    """Gives the warnings."""
    moving.check_free(target)
    wanted = codec or found.codec_before
    moving.check_space(target, _needed_bytes(found, wanted, as_it_was=codec is None))
    with publishing(target, MANIFEST, point=FAULT) as partial:
        warnings: tuple[str, ...] = ()
        if wanted is None:
            moving.copy_set(found.root, found.paths, found.extras, partial, show)
        else:
            _, digest = moving.repack_set(found.root, found.original, wanted, partial, found.extras, show)
            _check_content(found, digest)
            warnings = () if codec else _as_it_was(partial, found)
    return warnings


def _prepare(source: Path, target: Path) -> bool:
    """Refuse places that cannot be used, and end the removals that killed runs began there.

    Gives whether that of the source was one.
    """
    if source.is_symlink():
        raise UsageError(f"{source} is a link; name the folder it leads to")
    one, other = source.resolve(), target.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise UsageError(f"{source} and {target} are the same, or lie within each other; choose places apart")
    moving.finish_removal(target)
    return moving.finish_removal(source)


def _archived_before(source: Path, target: Path) -> Moved:
    """A run that was killed, or had ended, when the set was gone from its place."""
    sidecar = read_sidecar(target)
    if sidecar is None or sidecar.source != str(source):
        raise UsageError(f"{source}: there is no such folder; name a packed set")
    return _moved_before(source, target)


def _moved_before(source: Path, target: Path) -> Moved:
    return replace(_ended(Found.at(target), target, True, True), source=source, source_bytes=0, removed=True)


def _is_recalled(found: Found, target: Path, codec: str | None) -> bool:
    """Whether the target is what this recall would make of the set: a run was killed before it removed it."""
    if not os.path.lexists(target / MANIFEST):
        return False
    manifest = read_manifest(target)
    if codec is None:
        return manifest == found.original
    if codec_of(manifest) != codec or manifest["num_samples"] != found.manifest["num_samples"]:
        return False
    chunk_samples = int(found.original["chunk_samples"])
    there = moving.content_digest(target, chunk_samples)
    return there == moving.content_digest(found.root, chunk_samples)


def _check_content(found: Found, digest: str) -> None:
    """Raise `DataError` where the values are not those that were archived."""
    wanted = None if found.sidecar is None else found.sidecar.content_digest
    if wanted not in (None, digest):
        raise DataError(
            f"{found.root}: its content digest is {digest}, but was {wanted} when it was archived: it is another set, "
            f"which stays; put the right files there, or remove {SIDECAR} to take it as it is"
        )


def _as_it_was(partial: Path, found: Found) -> tuple[str, ...]:
    """Give a set that was packed back its own manifest; or a warning, where it did not become the same."""
    manifest, original = read_manifest(partial), found.original
    if manifest["identity"] != original["identity"]:
        then, now = found.sidecar.versions if found.sidecar else {}, encoder_versions()
        return (
            f"the set is {manifest['identity']} now and was {original['identity']}: it holds the same values, but "
            "other stored bytes, so a run that began with it is refused; it was archived with "
            f"{_words(then)}, and packed back with {_words(now)}; {found.root} stays: recall it with the versions that "
            "packed it first to get the old identity",
        )
    if manifest["shards"] == original["shards"]:  # what else it said, such as how the codec was chosen
        _write(partial / MANIFEST, (json.dumps(original, indent=1) + "\n").encode())
    return ()


def _words(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "unknown versions"


def _needed_bytes(found: Found, codec: str | None, as_it_was: bool = False) -> int:
    """What the copy takes: known, or estimated from a sample."""
    if codec is None:
        return found.num_bytes
    if as_it_was:
        return sum(int(entry["bytes"]) for entry in found.original["shards"])
    return moving.estimated_bytes(found.root, found.original, codec)


def _ended(found: Found, target: Path, keep: bool, went_on: bool) -> Moved:
    """Remove the original, unless it is to be kept, and say what came of it all."""
    manifest = read_manifest(target)
    if not keep:
        moving.remove_set(found.root, str(found.manifest["identity"]), found.keys)
    return Moved(
        source=found.root,
        target=target,
        identity=str(manifest["identity"]),
        codec=codec_of(manifest),
        source_bytes=found.num_bytes,
        target_bytes=sum(int(entry["bytes"]) for entry in manifest["shards"]),
        removed=not keep,
        went_on=went_on,
    )


def _write(path: Path, content: bytes) -> None:
    with named(path, "written"):
        fault_point(FAULT)
        path.write_bytes(content)


def _absolute(path: Path) -> Path:
    """Without links being followed; `.` has a name then."""
    return Path(os.path.abspath(path))


def _silent(activity: str, done: int, total: int) -> None:
    del activity, done, total
