"""A folder with one sub-folder of pictures per class, as a source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.errors import DataError
from hpctrain.h5.images import IMAGE_SUFFIXES, FilePictures, ImageSource
from hpctrain.h5.options import SourceOptions
from hpctrain.h5.tar_members import SPLITS


def open_image_folder(root: Path, how: SourceOptions) -> ImageSource:
    """A folder with one sub-folder of pictures per class; `label` (int64) numbers the classes in sorted
    order.

    Raises `DataError` when there are no classes, a class has no pictures, pictures lie beside the classes, or a folder
    in one is a link.
    """
    entries = sorted(root.iterdir())
    folders = [item for item in entries if not _is_hidden(item.name) and item.is_dir()]
    if not folders:
        found = len(entries)
        raise DataError(
            f"{root} has no class sub-folders ({found} other entries); put the images of each class into a sub-folder "
            "of its own, or add a table (.csv) with the columns file and label or text"
        )
    paths: list[Path] = []
    labels: list[int] = []
    others = [item for item in entries if item not in folders and not _is_hidden(item.name)]
    beside = [item for item in others if item.suffix.lower() in IMAGE_SUFFIXES]
    if beside:
        raise DataError(
            f"{beside[0]} lies beside the folders of the classes, not in one ({len(beside)} such pictures); move it "
            "into one"
        )
    for label, folder in enumerate(folders):
        how.opening("listing", label, len(folders), f"{len(paths)} pictures")
        files = _files_below(folder)
        images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
        if not images:
            raise DataError(
                f"{folder}: the class has no images ({', '.join(sorted(IMAGE_SUFFIXES))}); "
                "add some or remove the folder"
            )
        paths += images
        labels += [label] * len(images)
        others += [path for path in files if path.suffix.lower() not in IMAGE_SUFFIXES]
    columns = {"label": np.array(labels, np.int64)}
    names = [folder.name for folder in folders]
    return ImageSource(FilePictures(paths), how, columns, names, _warnings(root, names, others))


def _warnings(root: Path, classes: Sequence[str], others: Sequence[Path]) -> tuple[str, ...]:
    warnings = []
    if len(classes) > 1 and SPLITS.issuperset(classes):
        warnings.append(
            f"{root}: {' and '.join(classes)} are taken for classes; if they are parts of a "
            f"data set, pack each by itself"
        )
    if others:
        warnings.append(f"{len(others)} files that are no images are left out (first: {others[0]})")
    return tuple(warnings)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _files_below(folder: Path) -> list[Path]:
    """All files below a folder, hidden ones and hidden folders aside, sorted by their relative name."""

    def refuse(error: OSError) -> None:
        raise error  # it would leave out what it cannot list

    files = []
    for at, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for name in folders:
            if os.path.islink(os.path.join(at, name)):
                raise DataError(
                    f"{at}/{name} is a link to a folder, which is not followed; move the pictures there, or remove it"
                )
        files += [Path(at) / name for name in names if not name.startswith(".")]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())
