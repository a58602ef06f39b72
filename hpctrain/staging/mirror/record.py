"""The record of a mirror, `mirror.json`: what it is of, and which boot of the node filled it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from hpctrain.durable import replace_file
from hpctrain.errors import DataError, StorageError
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.stored import StoredChunks

OnChanged = Literal["stop", "restage"]

RECORD: Final = "mirror.json"
VERSION: Final = 1
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Record:
    """What `mirror.json` holds.

    Attributes:
        identity: of the set.
        boot_id: of the boot under which an owner last took the mirror; what later boots find may never have reached
            the disk.
        file_keys: of the shared files, as in `StoredChunks`.
        quota_bytes: of the mirror.
    """

    identity: str
    boot_id: str
    file_keys: list[list[int]]
    quota_bytes: int
    version: int = VERSION

    @classmethod
    def of(cls, stored: StoredChunks, quota_bytes: int) -> Record:
        """The record of this set, this boot."""
        return cls(stored.identity, boot_id(), stored.file_keys.tolist(), quota_bytes)

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """The record in the mirror `folder`; None where there is none.

        Raises `DataError` for a damaged one and one of another version, `OSError`.
        """
        try:
            raw = json.loads((folder / RECORD).read_bytes())
            record = cls(
                str(raw["identity"]),
                str(raw["boot_id"]),
                [[int(value) for value in key] for key in raw["file_keys"]],
                int(raw["quota_bytes"]),
                int(raw["version"]),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{RECORD} is damaged ({error})") from error
        if record.version != VERSION:
            raise DataError(f"{RECORD} is of version {record.version}, not {VERSION}")
        return record

    def write(self, folder: Path) -> None:
        """Put the record into the mirror `folder`, whole and durably. Raises `OSError`."""
        for left in folder.glob(f".{RECORD}.tmp-*"):  # by an owner that was killed
            left.unlink(missing_ok=True)
        fault_point("staging.write")
        replace_file(folder / RECORD, json.dumps(asdict(self)).encode())


def earlier_record(
    folder: Path, stored: StoredChunks, on_changed: OnChanged, holds_chunks: bool
) -> tuple[Record | None, str | None]:
    """The record of an earlier owner, and in words what is wrong with it; without a record a mirror is to be emptied.

    Raises `StorageError` where the shared files of a set without digests have changed and `on_changed` is "stop".
    """
    try:
        found = Record.read(folder)
    except (DataError, OSError) as error:
        return None, f"{getattr(error, 'strerror', None) or error}: emptied"
    if found is None:
        return None, "its record has gone: emptied" if holds_chunks else None
    if found.identity != stored.identity:
        return None, "its record is that of another set: emptied"
    if stored.has_digests or found.file_keys == stored.file_keys.tolist():
        return found, None
    problem = "the shared files have changed since it was filled"
    if on_changed == "stop":
        raise StorageError(
            f"mirror of {stored.identity}: {problem}; put the old ones back, begin a new run, or set "
            'staging.on_changed_source = "restage"'
        )
    return None, f"{problem}: emptied"


def boot_id() -> str:
    """What tells this boot from others; empty where the kernel does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
