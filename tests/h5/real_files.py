"""A process for test_real_files: a file that brings libhdf5 down must not end the tests.

Reads paths from standard input, one JSON list; writes one JSON line per file: what the survey says about it, and how
the values of its datasets compare with h5py. A path is written alone before its file is touched.
"""

import json
import sys
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  (registers the filters of libhdf5)
import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.dataset import Dataset, open_dataset
from hpctrain.h5.reader import FileSource
from hpctrain.h5.survey_child import Walk
from hpctrain.h5.survey_facts import Limits

_MAX_COMPARED_BYTES = 8 << 20


def examine(path: Path) -> dict[str, Any]:
    """What `survey` finds, without a process for each file, and the values compared."""
    told: list[tuple[str, Any]] = []
    request = {"wanted": [], "path": str(path), "verify_chunks": 2, "skip": [], "done": []}
    Walk(request, Limits(), lambda kind, value: told.append((kind, value))).run()
    datasets = {value["name"]: value for kind, value in told if kind == "dataset"}
    return {
        "roads": {name: item["road"] for name, item in datasets.items()},
        "reasons": {name: item["reason"] for name, item in datasets.items() if item["reason"]},
        "findings": [(value["name"], value["cause"]) for kind, value in told if kind == "finding"],
        "links": [(value["name"], value["kind"]) for kind, value in told if kind == "link"],
        "refused": " ".join(value for kind, value in told if kind == "refused"),
        "compared": {name: compared(path, name) for name, item in datasets.items() if item["road"] != "none"},
    }


def compared(path: Path, name: str) -> str:
    """ "equal", or how the values that `Dataset` reads differ from those of h5py; the first rows of large ones."""
    dataset = open_dataset(path, name, verify_chunks=0)
    with h5py.File(path, "r", locking=False) as file, FileSource() as source:
        node = file[name]
        rows = rows_of(dataset)
        try:
            ours = dataset.read_rows(0, rows, source)
        except DataError as error:
            return f"DataError: {error}"
        try:
            theirs = np.asarray(node[()] if not node.shape else node[:rows])
        except (OSError, TypeError) as error:
            return f"only ours: h5py {error}"
    return (
        "equal"
        if same(ours.reshape(theirs.shape), theirs)
        else f"differs: {ours.ravel()[:3]} {theirs.ravel()[:3]}"
    )


def rows_of(dataset: Dataset) -> int:
    if not dataset.shape:
        return 1
    row_bytes = int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize
    return min(dataset.shape[0], max(1, _MAX_COMPARED_BYTES // max(row_bytes, 1)))


def same(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> bool:
    """Equal bit for bit, apart from byte order and the padding between the members of a compound."""
    if ours.dtype.names is not None:
        return ours.dtype.names == theirs.dtype.names and all(
            same(ours[n], theirs[n]) for n in ours.dtype.names
        )
    if ours.dtype.hasobject:
        return all(map(same_object, ours.ravel(), theirs.ravel()))
    native = theirs.astype(theirs.dtype.newbyteorder("="))
    return ours.dtype == native.dtype and ours.tobytes() == native.tobytes()


def same_object(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, h5py.Reference | h5py.RegionReference):  # they have no equality
        return type(ours) is type(theirs) and bool(ours) == bool(theirs)
    return np.array_equal(ours, theirs)


def main() -> None:
    """Examine the files asked for."""
    for path in json.load(sys.stdin):
        print(path, flush=True)
        print(json.dumps(examine(Path(path))), flush=True)


if __name__ == "__main__":
    main()
