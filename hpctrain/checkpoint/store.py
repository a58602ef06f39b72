"""The commit protocol: a checkpoint is durable and whole, or it does not exist.

Write under a name that carries the attempt; fsync the files; write the manifest with sizes and digests; fsync; one
rename; fsync the directory; only then prune older ones. The rename is the commit. What a killed writer leaves behind
starts with `.tmp-` and is swept by the next attempt.

A checkpoint `step-000000120-a0002` holds `tensors.safetensors`, `state.json` and `manifest.json`. The manifest lists a
digest per block of 16 MiB, so that the ranks of a restore can each check a slice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from hpctrain.checkpoint.names import MANIFEST, CheckpointName, committed_checkpoints
from hpctrain.checkpoint.snapshot import Cursor, Snapshot
from hpctrain.durable import fsync_path
from hpctrain.errors import HpctrainError, StorageError
from hpctrain.resilience.attempts import is_superseded
from hpctrain.resilience.faults import fault_point

BLOCK_BYTES = 16 << 20
FORMAT_VERSION = 1

_TENSORS, _STATE = "tensors.safetensors", "state.json"


class CheckpointRefused(HpctrainError):
    """A checkpoint is damaged or not whole; the message says which file and why."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a file whose digest the manifest holds."""

    file: str
    offset: int
    size: int
    digest: str


class CheckpointStore:
    """The `checkpoints/` directory of a run, as one attempt sees it.

    Args:
        directory: `checkpoints/` of a run directory; made at the first commit.
        attempt: number of this attempt; every name it writes carries it.
        admissible: names that this attempt may restore. With its own they are all it counts; anything else is a late
            write of an older attempt.
    """

    def __init__(self, directory: Path, attempt: int, admissible: Sequence[str] = ()) -> None:
        self.directory, self.attempt = directory, attempt
        self._admissible = set(admissible)

    def commit(self, snapshot: Snapshot) -> Path:
        """Write a snapshot and publish it; returns its directory. Raises `StorageError`; nothing is left then.

        A checkpoint of the same step and attempt that exists already is kept.
        """
        final = self.directory / str(CheckpointName(snapshot.cursor.step, self.attempt))
        if final.exists():
            return final
        temporary = self.directory / f".tmp-{final.name}-{os.getpid()}"
        try:
            if not self.directory.exists():
                self.directory.mkdir()
                fsync_path(self.directory.parent)
            self._write(snapshot, temporary)
            fault_point("checkpoint.rename", snapshot.cursor.step)
            os.rename(temporary, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StorageError(
                f"checkpoint of step {snapshot.cursor.step} not saved in {self.directory}: {error}; older ones are kept"
            ) from error
        fsync_path(self.directory)
        fault_point("checkpoint.committed", snapshot.cursor.step)
        return final

    def prune(self, keep: int) -> None:
        """Keep the newest `keep` checkpoints that count, and remove all others.

        An attempt that was superseded removes nothing: to it, those of the newer one do not count.
        """
        kept = [name for name in self.committed() if self._counts(name)][:keep]
        for name in self.committed():
            if name not in kept:
                if self._is_superseded():  # asked each time: removing the one before may have taken long
                    return
                fault_point("checkpoint.prune")
                # renamed first, so that no half-removed directory carries a committed name
                doomed = self.directory / f".tmp-pruned-{name}-a{self.attempt:04d}"
                os.rename(self.directory / str(name), doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def set_aside(self, name: str) -> None:
        """Give a damaged checkpoint the name `refused-NAME`: kept to be looked at, no longer counted."""
        with contextlib.suppress(OSError):  # where it cannot be renamed it is refused again next time
            if not self._is_superseded():
                os.rename(self.directory / name, self.directory / f"refused-{name}")

    def sweep(self) -> None:
        """Remove what killed writers left behind; not what a newer attempt is writing."""
        if self._is_superseded():
            return
        for path in self.directory.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)

    def committed(self) -> list[CheckpointName]:
        """The committed checkpoints, newest first (by step, then by attempt)."""
        return committed_checkpoints(self.directory)

    def _counts(self, name: CheckpointName) -> bool:
        return name.attempt == self.attempt or str(name) in self._admissible

    def _is_superseded(self) -> bool:
        return is_superseded(self.directory.parent, self.attempt)

    def blocks(self, name: str) -> list[Block]:
        """The blocks that the manifest of a checkpoint lists, after a check of the file sizes.

        Raises `CheckpointRefused` where the manifest is missing, no manifest, of another version, or the sizes differ;
        `StorageError` where it cannot be read.
        """
        directory = self.directory / name
        try:
            fault_point("restore.verify")
            manifest = json.loads((directory / MANIFEST).read_bytes())
            if manifest["version"] != FORMAT_VERSION:
                raise CheckpointRefused(
                    f"{directory / MANIFEST}: version {manifest['version']}, {FORMAT_VERSION} is read"
                )
            if _document_digest(manifest) != manifest["digest"]:
                raise CheckpointRefused(f"{directory / MANIFEST}: its own digest does not match")
            for file, size in manifest["sizes"].items():
                actual = (directory / file).stat().st_size
                if actual != size:
                    raise CheckpointRefused(f"{directory / file}: {actual} bytes, the manifest says {size}")
            return [Block(**block) for block in manifest["blocks"]]
        except OSError as error:
            raise _refusal_or_failure(error) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointRefused(f"{directory / MANIFEST}: not a manifest: {error!r}") from error

    def verify(self, name: str, blocks: list[Block]) -> None:
        """Compare blocks with their digests; raises `CheckpointRefused` naming file and offset, or `StorageError`."""
        for block in blocks:
            path = self.directory / name / block.file
            try:
                fault_point("restore.block")
                with open(path, "rb") as file:
                    file.seek(block.offset)
                    digest = xxhash.xxh3_128_hexdigest(file.read(block.size))
            except OSError as error:
                raise _refusal_or_failure(error) from error
            if digest != block.digest:
                end = block.offset + block.size
                raise CheckpointRefused(f"{path}: bytes {block.offset} to {end} do not match their digest")

    def load(self, name: str) -> Snapshot:
        """Read a verified checkpoint into memory; raises `CheckpointRefused`, or `StorageError` where reading fails.

        Read, not mapped: pages of a mapped file would be read long after they were verified, and an I/O error then
        is a SIGBUS.
        """
        directory = self.directory / name
        try:
            fault_point("restore.load")
            state = json.loads((directory / _STATE).read_bytes())
            tensors = load((directory / _TENSORS).read_bytes())
            return Snapshot(Cursor(**state["cursor"]), tensors, state["optimizer"])
        except OSError as error:
            raise _refusal_or_failure(error) from error
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointRefused(f"{directory}: {error!r}") from error

    def _write(self, snapshot: Snapshot, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        step = snapshot.cursor.step
        fault_point("checkpoint.write", step)
        save_file(snapshot.tensors, directory / _TENSORS)
        state = {"cursor": dataclasses.asdict(snapshot.cursor), "optimizer": snapshot.optimizer}
        (directory / _STATE).write_text(json.dumps(state), encoding="utf-8")
        for file in (_TENSORS, _STATE):
            fsync_path(directory / file)
        fault_point("checkpoint.manifest", step)
        # the digests are of what the files read back as, not of what was meant to be written
        blocks = [block for file in (_TENSORS, _STATE) for block in _file_blocks(directory, file)]
        manifest: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "sizes": {file: (directory / file).stat().st_size for file in (_TENSORS, _STATE)},
            "blocks": [dataclasses.asdict(block) for block in blocks],
        }
        manifest["digest"] = _document_digest(manifest)
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        fsync_path(directory / MANIFEST)
        fsync_path(directory)


def _file_blocks(directory: Path, file: str) -> Iterator[Block]:
    with open(directory / file, "rb") as stream:
        offset = 0
        while chunk := stream.read(BLOCK_BYTES):
            yield Block(file, offset, len(chunk), xxhash.xxh3_128_hexdigest(chunk))
            offset += len(chunk)


def _document_digest(document: dict[str, Any]) -> str:
    content = {key: value for key, value in document.items() if key != "digest"}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _refusal_or_failure(error: OSError) -> CheckpointRefused | StorageError:
    """A file that is not there is damage; one that cannot be read now may be whole, and the attempt is retried."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return CheckpointRefused(f"{error.filename}: {error.strerror}")
    return StorageError(
        f"{error.filename}: cannot be read: {error.strerror or error}; checkpoints are left as they are"
    )
