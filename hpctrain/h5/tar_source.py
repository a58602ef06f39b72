"""Tar archives as a source: WebDataset shards, or one folder of pictures per class, as `tar` made it of a tree.

Which of them it is, is seen by the names: in a tree, every picture is a sample of its own (nothing but pictures has its
name with another ending) and lies in a folder.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.each import EachSource, Numbers, OnBad, Values, make_samples
from hpctrain.h5.fields import Field
from hpctrain.h5.images import IMAGE_SUFFIXES, ImageSource, PictureField
from hpctrain.h5.options import SourceOptions
from hpctrain.h5.sources import Columns, Source, check_field_name
from hpctrain.h5.tar_members import SPLITS, TarMembers
from hpctrain.h5.webdataset import JsonPart, Part, is_part, open_part

_SAMPLED: Final = 512
_MAX_ENDINGS: Final = 64
_SHOWN: Final = 3


def open_tars(
    paths: Sequence[Path], how: SourceOptions, inside: str = "", warnings: tuple[str, ...] = ()
) -> Source:
    """Archives of one data set, one after the other; of what lies in the folder `inside` of them alone, if given.

    Raises `DataError` for archives that are damaged, beyond the bounds of `how`, or hold nothing to pack, `UsageError`
    for a folder that is not in them.
    """
    members = TarMembers(paths, how)
    chosen = np.arange(len(members))
    if inside:
        within = f"{PurePosixPath(inside)}/"
        chosen = np.array([i for i in range(len(members)) if members.name(i).startswith(within)], np.int64)
        if not len(chosen):
            raise UsageError(
                f"{paths[0]} has no folder {inside!r}; name one that it has, or the archive alone"
            )
    if not len(chosen):
        raise DataError(f"{paths[0]}: holds no files to pack; choose another archive")
    if _is_tree(members, chosen):
        return _open_tree(paths[0], members, chosen, how, warnings)
    return WebDatasetSource(members, chosen, how, warnings)


class TarPictures:
    """Pictures that are members of archives, by number; -1 where a sample has none."""

    def __init__(self, members: TarMembers, numbers: Numbers) -> None:
        self._members, self._numbers = members, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def name(self, number: int) -> str:
        """Archive and member."""
        member = int(self._numbers[number])
        return self._members.where(member) if member >= 0 else f"sample {number}"

    def load(self, number: int) -> bytes:
        """The bytes of the member."""
        member = int(self._numbers[number])
        if member < 0:
            raise DataError(f"sample {number} has no picture, as others have; add it, or remove the sample")
        return self._members.read(member)

    def num_bytes(self) -> int:
        """Of all."""
        return sum(self._members.size(member) for member in self._numbers.tolist() if member >= 0)


def _is_picture(name: str) -> bool:
    return f".{name.rpartition('.')[2].lower()}" in IMAGE_SUFFIXES


def _key_and_ending(name: str) -> tuple[str, str]:
    """The name up to the first dot after the last slash, and what follows it, in lower case."""
    folder, slash, last = name.rpartition("/")
    key, _, ending = last.partition(".")
    return folder + slash + key, ending.lower()


def _is_tree(members: TarMembers, chosen: Numbers) -> bool:
    any_picture, last, last_is_picture = False, "", False
    for member in chosen.tolist():
        name = members.name(member)
        key, is_picture = _key_and_ending(name)[0], _is_picture(name)
        if (key == last and not (is_picture and last_is_picture)) or (is_picture and "/" not in name):
            return False
        any_picture, last, last_is_picture = any_picture or is_picture, key, is_picture
    return any_picture


def _open_tree(
    path: Path, members: TarMembers, chosen: Numbers, how: SourceOptions, warnings: tuple[str, ...]
) -> ImageSource:
    """A folder of pictures per class, in the order in which a folder on disk is packed."""
    files = {member: members.name(member) for member in chosen.tolist()}
    parts = {member: file.split("/") for member, file in files.items() if _is_picture(file)}
    depth = _class_depth({tuple(item[:-1]) for item in parts.values()})
    beside = [files[member] for member, item in parts.items() if len(item) <= depth + 1]
    tops = sorted({item[depth] for item in parts.values()})
    if not beside and len(tops) > 1 and SPLITS.issuperset(tops):
        depth += 1
        beside = [files[member] for member, item in parts.items() if len(item) <= depth + 1]
        warnings += (
            f"{path}: {' and '.join(tops)} are joined, and the folders in them are the classes; for one of them alone "
            f"pack {path.joinpath(*next(iter(parts.values()))[: depth - 1], tops[0])}",
        )
    if beside:
        raise DataError(
            f"{path}: {beside[0]} lies beside the folders of the classes, not in one ({len(beside)} such pictures); "
            "move it into one"
        )
    order = sorted(parts, key=lambda member: (parts[member][depth], files[member]))
    classes = sorted({item[depth] for item in parts.values()})
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers[parts[member][depth]] for member in order], np.int64)
    others = [file for member, file in files.items() if member not in parts]
    if others:
        warnings += (f"{len(others)} files that are no images are left out (first: {path}: {others[0]})",)
    pictures = TarPictures(members, np.array(order, np.int64))
    return ImageSource(pictures, how, {"label": labels}, classes, warnings)


def _class_depth(folders: set[tuple[str, ...]]) -> int:
    """How many folders lie above those of the classes: those that all pictures share, but of one folder its own."""
    shared = 0
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    return shared - 1 if len(folders) == 1 else shared


class WebDatasetSource(EachSource):
    """Samples of several members each, as `webdataset` says; the fields are what all endings together make.

    Pictures are `image`, labels `label`, texts `text`, arrays `data`, or what stands before the last dot of the ending
    (`left.jpg` is the field `left`); of JSON the names in it. A sample that lacks one of them is bad.
    """

    def __init__(
        self, members: TarMembers, chosen: Numbers, how: SourceOptions, warnings: tuple[str, ...] = ()
    ) -> None:
        self.classes: tuple[str, ...] | None = None
        self._members = members
        by_ending = _grouped(members, chosen)
        self._numbers, others = _known(by_ending)
        if not self._numbers:
            raise DataError(
                f"{members.where(int(chosen[0]))}: neither this member nor another is a picture, .cls, .txt, .json or "
                ".npy; there is nothing to pack"
            )
        self.num_samples = len(next(iter(self._numbers.values())))
        self._parts = {
            ending: open_part(ending, TarPictures(members, numbers), self._some(ending), how)
            for ending, numbers in self._numbers.items()
        }
        self.fields = self._joined_fields()
        self.warnings = warnings + _left_out(others, self._parts)

    def read_each(self, start: int, stop: int, on_bad: OnBad) -> tuple[Columns, Numbers]:
        """Samples [start, stop)."""
        return make_samples(self.fields, self._make, start, stop, on_bad)

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples; of what is not a picture estimated from some."""
        ending = next(ending for ending, part in self._parts.items() if name in part.fields)
        part = self._parts[ending]
        if isinstance(part, PictureField):
            return part.pictures.num_bytes()
        lengths = []
        for data, where in self._some(ending):
            with contextlib.suppress(DataError):  # told when it is read
                lengths.append(len(part.decode(data, where)[name]))
        return sum(lengths) * self.num_samples // max(len(lengths), 1)

    def _make(self, sample: int) -> Values:
        values: dict[str, npt.NDArray[Any]] = {}
        for ending, numbers in self._numbers.items():
            member = int(numbers[sample])
            if member < 0:
                there = max(int(item[sample]) for item in self._numbers.values())
                raise DataError(
                    f"{self._members.where(there)}: the sample has no .{ending}, as others have; add it, or remove the "
                    "sample (members of one must follow each other: `tar --sort=name`)"
                )
            values |= self._parts[ending].decode(self._members.read(member), self._members.where(member))
        return values

    def _joined_fields(self) -> dict[str, Field]:
        fields: dict[str, Field] = {}
        for ending, part in self._parts.items():
            for name, field in part.fields.items():
                check_field_name(name)
                if name in fields:
                    raise DataError(
                        f"{self._members.where(int(self._numbers[ending].max()))}: makes a field {name!r}, which "
                        "another member of the sample makes too; leave one of them out of the archive"
                    )
                fields[name] = field
        return {name: fields[name] for name in sorted(fields)}

    def _some(self, ending: str) -> list[tuple[bytes, str]]:
        """Some members, spread evenly, and what messages call them."""
        there = self._numbers[ending][self._numbers[ending] >= 0]
        spread = np.unique(np.linspace(0, len(there) - 1, min(_SAMPLED, len(there)), dtype=np.int64))
        return [(self._members.read(i), self._members.where(i)) for i in there[spread].tolist()]


def _known(by_ending: Mapping[str, Numbers]) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Endings that can be packed, of the samples that have any of them; and the others."""
    known = {ending: numbers for ending, numbers in by_ending.items() if is_part(ending)}
    others = {ending: numbers for ending, numbers in by_ending.items() if ending not in known}
    if others and known:
        there = np.max(np.stack(list(known.values())), axis=0) >= 0
        known = {ending: numbers[there] for ending, numbers in known.items()}
    return known, others


def _left_out(others: Mapping[str, Numbers], parts: Mapping[str, Part]) -> tuple[str, ...]:
    warnings = [
        f"{np.count_nonzero(numbers >= 0)} members that end in {ending!r} are left out: they are neither picture, "
        ".cls, .txt, .json nor .npy"
        for ending, numbers in others.items()
    ]
    for ending, part in parts.items():
        names = part.left_out if isinstance(part, JsonPart) else []
        if names:
            warnings.append(
                f"{len(names)} names in .{ending} are left out ({', '.join(map(repr, names[:_SHOWN]))}): not in all "
                "samples, of mixed types, nested, or no names for fields"
            )
    return tuple(warnings)


def _grouped(members: TarMembers, chosen: Numbers) -> dict[str, Numbers]:
    """Members by ending, shape (samples,); -1 where a sample has none."""
    by_ending: dict[str, array[int]] = {}
    num_samples, last = 0, ""
    for member, key, ending in _keyed(members, chosen):
        if key != last:
            num_samples, last = num_samples + 1, key
        numbers = by_ending.setdefault(ending, array("q"))
        if len(by_ending) > _MAX_ENDINGS:
            raise DataError(
                f"{members.where(member)}: more than {_MAX_ENDINGS} endings of names, which begin at the first dot; "
                "name the members KEY.jpg, KEY.cls and so on, without dots in KEY"
            )
        numbers.extend([-1] * (num_samples - len(numbers)))
        if numbers[-1] >= 0:
            raise DataError(
                f"{members.where(member)}: the sample has two members that end in {ending!r}; remove one"
            )
        numbers[-1] = member
    for numbers in by_ending.values():
        numbers.extend([-1] * (num_samples - len(numbers)))
    return {ending: np.frombuffer(numbers, np.int64) for ending, numbers in by_ending.items()}


def _keyed(members: TarMembers, chosen: Numbers) -> Iterator[tuple[int, str, str]]:
    """Member, key of its sample, and ending; a sample does not go on in the next archive."""
    wanted = set(chosen.tolist()) if len(chosen) < len(members) else None
    for shard, (first, stop) in enumerate(pairwise(members.firsts)):
        for member in range(first, stop):
            key, ending = _key_and_ending(members.name(member))
            if wanted is None or member in wanted:
                yield member, f"{shard}:{key}", ending
