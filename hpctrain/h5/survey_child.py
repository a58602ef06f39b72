"""The child process of `survey`: looks at one HDF5 file and says what it finds, one JSON line each.

The request comes as one JSON object on standard input. A line is `[kind, value]`: "at" [path, step] before an object is
touched, then "group", "dataset", "link", "finding", "refused" or "cut" (see `hpctrain.h5.survey_facts`), and "end".
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import h5py

from hpctrain.errors import DataError, HpctrainError
from hpctrain.h5.dataset import open_dataset
from hpctrain.h5.index import H5PY_ERRORS, RECOPY, open_h5
from hpctrain.h5.survey_facts import DatasetSurvey, Finding, Limits, LinkSurvey
from hpctrain.h5.survey_words import dtype_words, filters_of, layout_of

_UNREADABLE: Final = (*H5PY_ERRORS, MemoryError)
_MAX_RATIO: Final = 1100  # of raw bytes to those of the file: deflate gets to 1032

Say = Callable[[str, Any], None]
"""Sends (kind, value) to the parent."""


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    limits = Limits(**request["limits"])
    _limit_memory(limits.memory_bytes)
    Walk(request, limits, _say).run()
    _say("end", None)


def _say(kind: str, value: Any) -> None:
    sys.stdout.write(json.dumps([kind, value]) + "\n")
    sys.stdout.flush()


def _limit_memory(extra_bytes: int) -> None:
    """Let the address space grow by `extra_bytes`; and leave no core file of a crash that is expected."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    wanted = pages * resource.getpagesize() + extra_bytes
    for kind, value in ((resource.RLIMIT_AS, wanted), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


class Walk:
    """A walk over the hard links of one file, each object once."""

    def __init__(self, request: dict[str, Any], limits: Limits, say: Say) -> None:
        self._path = Path(request["path"])
        self._verify_chunks = int(request["verify_chunks"])
        self._skip = {(name, step) for name, step in request["skip"]}
        self._done = set(request["done"])
        self._wanted = list(request["wanted"])
        self._limits, self._say = limits, say
        self._names: dict[int, bytes] = {}
        self._waiting: list[bytes] = []

    def run(self) -> None:
        """Say everything about the file."""
        try:
            file = open_h5(self._path, RECOPY)
        except HpctrainError as error:
            self._say("refused", str(error))
            return
        with file:
            for name in self._wanted:
                self._try(name)
            self._file_id = file.id
            self._waiting.append(b"/")
            while self._waiting:
                self._visit(self._waiting.pop())

    def _try(self, name: str) -> None:
        """Open a dataset by a name that may lead through links."""
        if (name, "open") not in self._skip:
            self._say("at", (name, "open"))
            try:
                open_dataset(
                    self._path, name, verify_chunks=self._verify_chunks, max_bytes=self._most_bytes()
                )
            except (HpctrainError, *_UNREADABLE) as error:
                self._find(name, error)

    def _visit(self, path: bytes) -> None:
        name = os.fsdecode(path)
        for step, look in (("open", self._open), ("attributes", self._attributes)):
            if (name, step) in self._skip:
                continue
            self._say("at", (name, step))
            try:
                look(path, name)
            except _UNREADABLE as error:
                self._find(name, error)
                return

    def _find(self, name: str, error: BaseException) -> str:
        """Say what is wrong with an object, and return it; its file and name are said anyway."""
        words = error.args[0] if isinstance(error, KeyError) and error.args else error
        cause = str(words).removeprefix(f"{self._path}: ").removeprefix(f"dataset {name!r}: ")
        if isinstance(error, MemoryError):
            cause = f"needs more than {self._limits.memory_bytes >> 20} MiB of memory"
        self._say("finding", asdict(Finding(name, cause or type(error).__name__)))
        return cause

    def _open(self, path: bytes, name: str) -> None:
        if name in self._done:
            return
        node = h5py.h5o.open(self._file_id, path)
        if isinstance(node, h5py.h5g.GroupID):
            self._names[h5py.h5o.get_info(node).addr] = path
            self._say("group", name)
            self._list(node, path)
        elif isinstance(node, h5py.h5d.DatasetID):
            self._describe(node, name)

    def _attributes(self, path: bytes, name: str) -> None:
        h5py.h5a.iterate(h5py.h5o.open(self._file_id, path), lambda attribute: None)

    def _list(self, group: h5py.h5g.GroupID, path: bytes) -> None:
        """Queue the members of a group; those seen before the listing failed, too."""
        room = self._limits.max_objects - len(self._names)
        members: list[tuple[bytes, int, int]] = []

        def take(name: bytes, info: h5py.h5l.LinkInfo) -> bool:
            members.append((name, info.type, info.u))
            return len(members) > room

        try:
            group.links.iterate(take, info=True)
        finally:
            if len(members) > room:
                self._say("cut", f"only {self._limits.max_objects} objects were looked at")
                del members[room:]
            found = [item for item in members if self._is_new(group, path, *item)]
            self._waiting.extend(_join(path, name) for name, _, _ in reversed(found))

    def _is_new(self, group: h5py.h5g.GroupID, path: bytes, name: bytes, kind: int, address: int) -> bool:
        """Whether this link leads to an object not met before; another link is reported instead."""
        full = _join(path, name)
        if kind == h5py.h5l.TYPE_HARD and address not in self._names:
            if full.count(b"/") > self._limits.max_depth:
                self._say("cut", f"groups deeper than {self._limits.max_depth} were not looked at")
                return False
            self._names[address] = full
            return True
        try:
            what, target = self._link_words(group, name, kind, address)
        except _UNREADABLE as error:
            self._find(os.fsdecode(full), error)
        else:
            self._say("link", asdict(LinkSurvey(os.fsdecode(full), what, target)))
        return False

    def _link_words(self, group: h5py.h5g.GroupID, name: bytes, kind: int, address: int) -> tuple[str, str]:
        if kind == h5py.h5l.TYPE_HARD:
            return "hard", os.fsdecode(self._names[address])
        if kind == h5py.h5l.TYPE_SOFT:
            return "soft", os.fsdecode(group.links.get_val(name))
        if kind == h5py.h5l.TYPE_EXTERNAL:
            file, target = group.links.get_val(name)
            return "external", f"{os.fsdecode(target)} in {os.fsdecode(file)}"
        return "user-defined", f"link class {kind}"

    def _describe(self, node: h5py.h5d.DatasetID, name: str) -> None:
        plist, kind, space = node.get_create_plist(), node.get_type(), node.get_space()
        empty = space.get_simple_extent_type() == h5py.h5s.NULL
        shape = None if empty else tuple(space.get_simple_extent_dims())
        itemsize = kind.get_size()
        filters = filters_of(plist)
        found = DatasetSurvey(
            name=name,
            shape=shape,
            dtype=dtype_words(kind),
            itemsize=itemsize,
            layout=layout_of(plist),
            chunk_shape=tuple(plist.get_chunk()) if plist.get_layout() == h5py.h5d.CHUNKED else None,
            filters=tuple(words for _, words in filters),
            filter_ids=tuple(number for number, _ in filters),
            raw_bytes=0 if shape is None else math.prod(shape) * itemsize,
            stored_bytes=node.get_storage_size(),
            road="none",
            reason="looking at it failed",
        )
        self._say("dataset", asdict(found))  # what is known when reading it ends this process
        road, reason = self._road(found)
        self._say("dataset", asdict(replace(found, road=road, reason=reason)))

    def _road(self, found: DatasetSurvey) -> tuple[str, str]:
        """How the dataset is read, and why not in parallel; one that cannot be read at all is a finding."""
        try:
            self._check_size(found)
            dataset = open_dataset(
                self._path, found.name, verify_chunks=self._verify_chunks, max_bytes=self._most_bytes()
            )
        except (HpctrainError, *_UNREADABLE) as error:
            return "none", self._find(found.name, error)
        return dataset.road, dataset.reason

    def _check_size(self, found: DatasetSurvey) -> None:
        """Refuse what claims to be far larger than what the file can hold, before anything is allocated for it."""
        if found.raw_bytes > self._most_bytes():
            raise DataError(
                f"it claims to hold {found.raw_bytes} bytes, in a file of {self._path.stat().st_size}; the limit is "
                f"{self._limits.max_bytes} bytes: raise it (--max-gib) if the file is to be trusted"
            )

    def _most_bytes(self) -> int:
        """Raw bytes that a dataset of this file may claim to hold."""
        return max(self._limits.max_bytes, _MAX_RATIO * self._path.stat().st_size)


def _join(path: bytes, name: bytes) -> bytes:
    return path.rstrip(b"/") + b"/" + name


if __name__ == "__main__":
    main()
