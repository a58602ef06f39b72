"""Before a run touches files that nobody vouches for: a child process looks at them first, and may crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.survey import survey
from hpctrain.h5.survey_facts import Limits

HDF5_SUFFIXES: Final = frozenset({".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4", ".h5ad", ".mat"})


def hdf5_files(path: Path) -> list[Path]:
    """The HDF5 files that a path stands for: itself, or those in a folder, by name.

    Raises `UsageError` where there are none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(item for item in path.iterdir() if item.suffix.lower() in HDF5_SUFFIXES)
    if not found:
        raise UsageError(
            f"{path}: no HDF5 files in it (suffixes: {', '.join(sorted(HDF5_SUFFIXES))}); name a file, or pack the data"
        )
    return found


def refuse_damaged(paths: Sequence[Path], fields: Mapping[str, str], max_bytes: int) -> None:
    """Raise `DataError` where one of these datasets, or the file itself, cannot be read safely.

    Damage elsewhere in a file is nothing to a run that does not read it.
    """
    wanted = {"/" + place.strip("/") for place in fields.values()}
    for path in paths:
        found = survey(path, Limits(max_bytes=max_bytes), verify_chunks=0, wanted=sorted(wanted))
        if found.refused:
            raise DataError(found.refused)
        for finding in found.findings:
            if "/" + finding.name.strip("/") in wanted:
                raise DataError(
                    f"{path}: {finding.name}: {finding.cause}; repair the file, or leave the field out"
                )
