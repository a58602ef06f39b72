"""Which datasets of an HDF5 file are the fields: those that the user names, else those that fit together.

Files are listed by a child process (`hpctrain.h5.survey`), for a damaged one can crash libhdf5.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.fields import OFFSETS_SUFFIX
from hpctrain.h5.index import DIGESTS_GROUP
from hpctrain.h5.sources import check_field_name, is_field_name
from hpctrain.h5.survey import survey

_LABELS: Final = frozenset({"label", "labels", "target", "targets"})
_SHOWN: Final = 3


class Listed(Protocol):
    """What is known of a dataset before it is opened."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its extents; None where it holds nothing."""
        ...

    @property
    def raw_bytes(self) -> int:
        """Bytes of its values, uncompressed."""
        ...


@dataclass(frozen=True)
class Wanted:
    """The dataset of a field, and that of its offsets where it is ragged and not vlen."""

    path: str
    offsets: str = ""


def choose_fields(path: Path, named: Sequence[str]) -> tuple[dict[str, Wanted], tuple[str, ...]]:
    """The fields by name, and warnings about what was left out.

    `named` are `NAME=/path` or `/path`. Without any, the number of samples is the first extent that most bytes have in
    common, and all datasets of that extent are taken. Raises `DataError` for a file with none, for a damaged one, and
    for labels that some samples lack; `UsageError` for names that cannot be fields.
    """
    found = survey(path, verify_chunks=0)
    if found.refused:
        raise DataError(found.refused)
    datasets = {
        item.name.lstrip("/"): item
        for item in found.datasets
        if not item.name.lstrip("/").startswith(f"{DIGESTS_GROUP}/")
    }
    damaged = [item for item in found.findings if item.name.lstrip("/") in datasets or not datasets]
    if damaged and not named:
        raise DataError(
            f"{path}: {damaged[0].name!r} cannot be read: {damaged[0].cause}; "
            "name those to pack with --field NAME=/path, or repair the file"
        )
    return fields_among(path, named, datasets)


def fields_among(
    path: Path, named: Sequence[str], datasets: Mapping[str, Listed]
) -> tuple[dict[str, Wanted], tuple[str, ...]]:
    """What `choose_fields` gives, of datasets by their path in the file (without a slash before it)."""
    if named:
        return _named(path, named, datasets), ()
    return _fitting(path, datasets)


def _named(path: Path, named: Sequence[str], datasets: Mapping[str, Listed]) -> dict[str, Wanted]:
    wanted: dict[str, Wanted] = {}
    for item in named:
        name, given, at = item.partition("=")
        at = (at if given else item).strip("/")
        name = name if given else at.rpartition("/")[2]
        check_field_name(name)
        if name in wanted:
            raise UsageError(f"--field names {name!r} twice; give each dataset a name of its own: NAME=/path")
        wanted[name] = Wanted(at, _offsets_of(at, datasets))  # a link is not listed, but can be opened
    return wanted


def _fitting(path: Path, datasets: Mapping[str, Listed]) -> tuple[dict[str, Wanted], tuple[str, ...]]:
    samples = {name: _num_samples(name, datasets) for name in datasets}
    weights: Counter[int] = Counter()
    for name, count in samples.items():
        if count:
            weights[count] += datasets[name].raw_bytes
    if not weights:
        raise DataError(f"{path}: no dataset has rows to pack; `hpctrain inspect {path}` shows what it holds")
    num_samples = weights.most_common(1)[0][0]
    fitting = [name for name, count in samples.items() if count == num_samples]
    _refuse_short_labels(path, fitting, samples, datasets)
    names = _names(fitting)
    bad = [name for name in names if not is_field_name(name)]
    if len(bad) == len(names):
        check_field_name(bad[0])
    others = [
        name for name, count in samples.items() if count != num_samples and not _is_offsets(name, datasets)
    ]
    warnings = [
        f"{path}: {len(left)} datasets {why} and are left out ({_shown(left, datasets)}); "
        "name what you want with --field NAME=/path"
        for left, why in (
            (others, f"do not have {num_samples} rows as the others"),
            ([names[name] for name in bad], "have names that fields cannot have"),
        )
        if left
    ]
    wanted = {name: Wanted(at, _offsets_of(at, datasets)) for name, at in names.items() if name not in bad}
    return wanted, tuple(warnings)


def _shown(names: Sequence[str], datasets: Mapping[str, Listed]) -> str:
    return ", ".join(f"/{name} {datasets[name].shape}" for name in names[:_SHOWN])


def _num_samples(name: str, datasets: Mapping[str, Listed]) -> int:
    """Samples of a dataset; 0 where it has no rows or belongs to another."""
    shape = datasets[name].shape
    if not shape or _is_offsets(name, datasets):
        return 0
    offsets = _offsets_of(name, datasets)
    return (datasets[offsets].shape or (1,))[0] - 1 if offsets else shape[0]


def _offsets_of(name: str, datasets: Mapping[str, Listed]) -> str:
    """The dataset beside a 1-D one that holds its offsets; "" where there is none."""
    beside = name + OFFSETS_SUFFIX
    flat = all(item in datasets and len(datasets[item].shape or ()) == 1 for item in (name, beside))
    return beside if flat else ""


def _is_offsets(name: str, datasets: Mapping[str, Listed]) -> bool:
    base = name.removesuffix(OFFSETS_SUFFIX)
    return base != name and _offsets_of(base, datasets) == name


def _names(paths: Sequence[str]) -> dict[str, str]:
    """Field names: the last part of the path, or all of it where two datasets share that."""
    by_last: defaultdict[str, list[str]] = defaultdict(list)
    for at in paths:
        by_last[at.rpartition("/")[2]].append(at)
    names = {
        last if len(group) == 1 else at.replace("/", "."): at
        for last, group in by_last.items()
        for at in group
    }
    return {name: names[name] for name in sorted(names)}


def _refuse_short_labels(
    path: Path,
    fitting: Sequence[str],
    samples: Mapping[str, int],
    datasets: Mapping[str, Listed],
) -> None:
    """Labels of another length beside the samples are a mistake, not something to leave out."""
    groups = {at.rpartition("/")[0]: at for at in reversed(fitting)}
    for name, count in samples.items():
        group, _, last = name.rpartition("/")
        if last.lower() in _LABELS and group in groups and name not in fitting:
            beside = groups[group]
            raise DataError(
                f"{path}: /{beside} has {samples[beside]} samples but /{name} has {count}: labels are missing for "
                "some; mend the file, or name those to pack with --field NAME=/path"
            )
