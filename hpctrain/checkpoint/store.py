"""The commit protocol: a checkpoint is durable and whole, or it does not exist.

Write under a name that carries the attempt; fsync the files; write the manifest with sizes and digests; fsync; one
rename; fsync the directory; only then prune older ones. The rename is the commit. What a killed writer leaves behind
starts with `.tmp-` and is swept by the next attempt.

A checkpoint `step-000000120-a0002` holds `tensors.safetensors`, `state.json` and `manifest.json`. The manifest lists a
digest per block of 16 MiB, so that the ranks of a restore can each check a slice.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hpctrain.checkpoint.snapshot import Cursor, Snapshot
from hpctrain.errors import StorageError
from hpctrain.resilience.faults import fault_point

BLOCK_BYTES = 16 << 20
FORMAT_VERSION = 1

_NAME = re.compile(r"^step-(\d{9,})-a(\d{4,})$")
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


class CheckpointRefused(StorageError):
    """A checkpoint is damaged or not whole; the message says which file and why."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a file whose digest the manifest holds."""

    file: str
    offset: int
    size: int
    digest: str


def checkpoint_name(step: int, attempt: int) -> str:
    """Name of the checkpoint after `step` steps, written by `attempt`."""
    return f"step-{step:09d}-a{attempt:04d}"


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a checkpoint's name; None for anything else."""
    match = _NAME.match(name)
    return (int(match[1]), int(match[2])) if match else None


class CheckpointStore:
    """The `checkpoints/` directory of a run, as one attempt sees it."""

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory, self.attempt = directory, attempt

    def commit(self, snapshot: Snapshot) -> Path:
        """Write a snapshot and publish it; returns its directory. Raises `StorageError`; nothing is left then.

        A checkpoint of the same step and attempt that exists already is kept.
        """
        final = self.directory / checkpoint_name(snapshot.cursor.step, self.attempt)
        if final.exists():
            return final
        temporary = self.directory / f".tmp-{final.name}-{os.getpid()}"
        try:
            self.directory.mkdir(exist_ok=True)
            self._write(snapshot, temporary)
            fault_point("checkpoint.rename", snapshot.cursor.step)
            os.rename(temporary, final)
            _fsync(self.directory)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StorageError(
                f"checkpoint of step {snapshot.cursor.step} not saved in {self.directory}: {error}; older ones are kept"
            ) from error
        fault_point("checkpoint.committed", snapshot.cursor.step)
        return final

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` committed checkpoints."""
        for name in self.committed()[keep:]:
            fault_point("checkpoint.prune")
            # renamed first, so that no half-removed directory carries a committed name
            doomed = self.directory / f".tmp-pruned-{name}-a{self.attempt:04d}"
            os.rename(self.directory / name, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what killed writers left behind. Only the owner of the run may call it."""
        for path in self.directory.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)

    def committed(self) -> list[str]:
        """Names of the committed checkpoints, newest first (by step, then by attempt)."""
        if not self.directory.is_dir():
            return []
        found = [
            (parsed, path.name)
            for path in self.directory.iterdir()
            if (parsed := parse_checkpoint_name(path.name))
        ]
        return [name for _, name in sorted(found, reverse=True)]

    def blocks(self, name: str) -> list[Block]:
        """The blocks that the manifest of a checkpoint lists, after a check of the file sizes.

        Raises `CheckpointRefused` where the manifest is missing, unreadable, of another version, or the sizes differ.
        """
        directory = self.directory / name
        try:
            manifest = json.loads((directory / _MANIFEST).read_bytes())
            if manifest["version"] != FORMAT_VERSION:
                raise CheckpointRefused(
                    f"{directory / _MANIFEST}: version {manifest['version']}, {FORMAT_VERSION} is read"
                )
            if _document_digest(manifest) != manifest["digest"]:
                raise CheckpointRefused(f"{directory / _MANIFEST}: its own digest does not match")
            for file, size in manifest["sizes"].items():
                actual = (directory / file).stat().st_size
                if actual != size:
                    raise CheckpointRefused(f"{directory / file}: {actual} bytes, the manifest says {size}")
            return [Block(**block) for block in manifest["blocks"]]
        except CheckpointRefused:
            raise
        except OSError as error:
            raise CheckpointRefused(f"{error.filename}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointRefused(f"{directory / _MANIFEST}: not a manifest: {error!r}") from error

    def verify(self, name: str, blocks: list[Block]) -> None:
        """Compare blocks with their digests; raises `CheckpointRefused` naming the file and the offset."""
        for block in blocks:
            fault_point("restore.verify")
            path = self.directory / name / block.file
            try:
                with open(path, "rb") as file:
                    file.seek(block.offset)
                    digest = xxhash.xxh3_128_hexdigest(file.read(block.size))
            except OSError as error:
                raise CheckpointRefused(f"{path}: {error}") from error
            if digest != block.digest:
                raise CheckpointRefused(
                    f"{path}: bytes {block.offset} to {block.offset + block.size} do not match their digest"
                )

    def load(self, name: str) -> Snapshot:
        """Read a verified checkpoint; raises `CheckpointRefused`."""
        fault_point("restore.load")
        directory = self.directory / name
        try:
            state = json.loads((directory / _STATE).read_bytes())
            tensors = load_file(directory / _TENSORS)
            return Snapshot(Cursor(**state["cursor"]), tensors, state["optimizer"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
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
            _fsync(directory / file)
        fault_point("checkpoint.manifest", step)
        # the digests are of what the files read back as, not of what was meant to be written
        blocks = [block for file in (_TENSORS, _STATE) for block in _file_blocks(directory, file)]
        manifest: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "sizes": {file: (directory / file).stat().st_size for file in (_TENSORS, _STATE)},
            "blocks": [dataclasses.asdict(block) for block in blocks],
        }
        manifest["digest"] = _document_digest(manifest)
        (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _fsync(directory / _MANIFEST)
        _fsync(directory)


def _file_blocks(directory: Path, file: str) -> Iterator[Block]:
    with open(directory / file, "rb") as stream:
        offset = 0
        while chunk := stream.read(BLOCK_BYTES):
            yield Block(file, offset, len(chunk), xxhash.xxh3_128_hexdigest(chunk))
            offset += len(chunk)


def _document_digest(document: dict[str, Any]) -> str:
    content = {key: value for key, value in document.items() if key != "digest"}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
