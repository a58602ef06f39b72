import csv
import hashlib
import io
import json
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import DataError, StorageError
from hpctrain.recipes import emoji_data
from hpctrain.recipes.emoji_data import choose_concepts, plain_code, prepare_emoji, read_words, text_of

ENTRIES = [
    {"hexcode": "0023-FE0F-20E3", "label": "keycap: #", "tags": ["keycap"], "skins": [{"hexcode": "0023"}]},
    {"hexcode": "1F600", "label": "grinning face", "tags": ["cheerful", "big  grin"]},
    {"hexcode": "1F98A", "label": "fox", "tags": ['a "sly" one']},
    {"hexcode": "1FAEA", "label": "distorted face"},
]


def make_package(path: Path, files: dict[str, bytes]) -> str:
    """Write a .tgz and give its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with three small packages, which are the pinned ones."""
    drawn = {
        "TWITTER": ["0023-20e3", "1f600", "1f98a", "1f9d1-1f3fb"],
        "GOOGLE": ["0023-fe0f-20e3", "1f600", "1f98a"],
    }
    files: dict[str, dict[str, bytes]] = {
        name: {f"img/{name.lower()}/64/{code}.png": f"{name} {code}".encode() for code in codes}
        | {f"img/{name.lower()}/sheets/32.png": b"no", "emoji.json": b"[]"}
        for name, codes in drawn.items()
    }
    files["WORDS"] = {"en/data.json": json.dumps(ENTRIES).encode(), "de/data.json": b"["}
    for name, content in files.items():
        package = getattr(emoji_data, name)
        path = tmp_path / "cache" / f"{package.name}-{package.version}" / package.file_name
        monkeypatch.setattr(emoji_data, name, replace(package, sha256=make_package(path, content)))
    monkeypatch.setattr(emoji_data, "NUM_UNSEEN", 1)
    return tmp_path / "cache"


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_codes_are_compared_without_variation_selectors() -> None:
    assert plain_code("0023-fe0f-20e3") == plain_code("0023-20E3") == "0023-20E3"
    assert plain_code("1f3f4-200d-2620-fe0f") == "1F3F4-200D-2620"


def test_a_text_is_label_and_keywords_in_one_line() -> None:
    assert text_of(ENTRIES[1]) == "grinning face cheerful big grin"
    assert text_of({"label": "a\tb\n", "tags": ["c"]}) == "a b c"
    assert text_of({"label": "fox", "skins": []}) == "fox"


def test_concepts_are_those_drawn_in_every_style() -> None:
    first, second = (
        {"1F600": b"", "1F98A": b"", "0023-20E3": b""},
        {"1F600": b"", "0023-20E3": b"", "9999": b""},
    )
    chosen = choose_concepts(ENTRIES, first, second, num_unseen=0)
    assert [concept.code for concept in chosen] == ["0023-20E3", "1F600"]
    assert all(concept.seen for concept in chosen)


def test_the_unseen_are_those_of_the_smallest_digests_whatever_the_order() -> None:
    entries = [{"hexcode": f"{number:04X}", "label": "x"} for number in range(100)]
    style = {entry["hexcode"]: b"" for entry in entries}
    unseen = [concept.code for concept in choose_concepts(entries, style, num_unseen=5) if not concept.seen]
    assert unseen == ["0004", "001D", "0033", "003E", "0054"]  # golden: it must never change
    assert choose_concepts(entries[::-1], style, num_unseen=5) == choose_concepts(
        entries, style, num_unseen=5
    )


def test_preparing_writes_pictures_and_tables(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "raw"
    prepared = prepare_emoji(root, lambda line: None, cache)
    assert (prepared.train_samples, prepared.test_samples, prepared.fresh) == (2, 3, True)
    assert sorted(os.listdir(root)) == ["ATTRIBUTION.txt", "source.json", "test", "train"]
    train, test = table(root / "train" / "train.tsv"), table(root / "test" / "test.tsv")
    assert [list(rows[0]) for rows in (train, test)] == [
        ["file", "text", "concept"],
        ["file", "text", "concept", "seen"],
    ]
    assert [row["concept"] for row in test] == ["0", "1", "2"]
    assert {row["concept"] for row in train} == {row["concept"] for row in test if row["seen"] == "1"}
    for part, rows, style in (("train", train, "TWITTER"), ("test", test, "GOOGLE")):
        assert all((root / part / row["file"]).read_text().startswith(style) for row in rows)
        assert len(list((root / part).glob("*.png"))) == len(rows)
    assert [row["text"] for row in test] == [
        "keycap: # keycap",
        "grinning face cheerful big grin",
        'fox a "sly" one',
    ]
    notice = (root / "ATTRIBUTION.txt").read_text()
    assert "CC-BY 4.0" in notice
    assert "Apache License 2.0" in notice


def test_preparing_again_says_that_it_is_there(tmp_path: Path, cache: Path) -> None:
    first = prepare_emoji(tmp_path / "raw", lambda line: None, cache)
    shutil.rmtree(cache)
    assert prepare_emoji(tmp_path / "raw", lambda line: None, cache) == replace(first, fresh=False)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"en/data.json": b"["}, "is not JSON"),
        ({"en/data.json": b"{}"}, "not a list"),
        ({}, "is missing"),
        ({"en/data.json": bytes(17 << 20)}, "the bound is 16777216"),
    ],
)
def test_words_that_cannot_be_read_are_refused(tmp_path: Path, files: dict[str, bytes], said: str) -> None:
    make_package(tmp_path / "words.tgz", files)
    with pytest.raises(DataError, match=said):
        read_words(tmp_path / "words.tgz")


def test_a_picture_that_is_a_link_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = emoji_data.GOOGLE
    path = cache / f"{package.name}-{package.version}" / package.file_name
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("package/img/google/64/1f600.png")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(emoji_data, "GOOGLE", replace(package, sha256=sha256))
    with pytest.raises(DataError, match="not a regular one"):
        prepare_emoji(tmp_path / "raw", lambda line: None, cache)
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.slow
def test_the_real_emoji(tmp_path: Path) -> None:
    """The pinned packages, fetched by npm into the user's cache (136 MiB the first time)."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not on PATH")
    try:
        prepared = prepare_emoji(tmp_path / "raw", lambda line: None)
    except StorageError as error:
        pytest.skip(f"npm found no way to the registry: {error}")
    assert (prepared.train_samples, prepared.test_samples) == (1721, 1911)
    rows: list[dict[str, Any]] = table(tmp_path / "raw" / "test" / "test.tsv")
    assert sum(row["seen"] == "0" for row in rows) == 190
    assert len({row["text"] for row in rows}) == 1911
    seen = [row["concept"] for row in rows if row["seen"] == "1"]
    assert [row["concept"] for row in table(tmp_path / "raw" / "train" / "train.tsv")] == seen
    concepts = "\n".join(f"{row['file']} {row['text']} {row['seen']}" for row in rows)
    assert (
        hashlib.sha256(concepts.encode()).hexdigest()
        == "10216cbcb653da11bd6e72dd1cebdfa7369d21b5f8d93d8cbdda7c238fd46a1b"
    )
