"""The input of the `emoji` recipe: concepts that have a picture in two drawing styles, and English words.

The pictures are the 64-pixel PNG files of two npm packages, the words the label and keywords of a third. A
concept is an emoji that the third lists at its top level (which leaves out skin tones) and that both styles
draw: 1,911 of them. In the training set are the first style's pictures, less those of 190 concepts; in the
test set the second style's pictures of all.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpctrain.errors import DataError
from hpctrain.recipes.archives import Limits, read_tar
from hpctrain.recipes.fetch import Package, Say, fetch
from hpctrain.recipes.prepared import ATTRIBUTION_FILE, Prepared, prepare

TRAIN_STYLE: Final = "twitter"
TEST_STYLE: Final = "google"
TWITTER: Final = Package(
    manager="npm",
    name="emoji-datasource-twitter",
    version="16.0.0",
    file_name="emoji-datasource-twitter-16.0.0.tgz",
    sha256="f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
    size_bytes=61_683_754,
)
GOOGLE: Final = Package(
    manager="npm",
    name="emoji-datasource-google",
    version="16.0.0",
    file_name="emoji-datasource-google-16.0.0.tgz",
    sha256="fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    size_bytes=74_344_091,
)
WORDS: Final = Package(
    manager="npm",
    name="emojibase-data",
    version="17.0.0",
    file_name="emojibase-data-17.0.0.tgz",
    sha256="d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a",
    size_bytes=6_711_091,
)
VERSION: Final = 1
"""Raised whenever the files below would come out different."""

NUM_UNSEEN: Final = 190
_COLUMNS: Final = ("file", "text", "concept", "seen")
_WORDS_FILE: Final = "package/en/data.json"
_PICTURE_LIMITS: Final = Limits(members=8_000, member_bytes=256 << 10)
_WORDS_LIMITS: Final = Limits(members=2_000, member_bytes=16 << 20)

ATTRIBUTION: Final = """\
train/*.png   Twemoji graphics by Twitter, Inc. and other contributors, licensed CC-BY 4.0
              (https://creativecommons.org/licenses/by/4.0/), taken from the npm package
              emoji-datasource-twitter 16.0.0 by Cal Henderson (MIT). Unchanged.
test/*.png    Noto Emoji by Google LLC, licensed under the Apache License 2.0
              (https://www.apache.org/licenses/LICENSE-2.0), taken from the npm package
              emoji-datasource-google 16.0.0 by Cal Henderson (MIT). Unchanged.
*/*.tsv       English labels and keywords of Unicode CLDR (Unicode License v3), taken from the npm package
              emojibase-data 17.0.0 by Miles Johnson (MIT). Changed: label and keywords are joined.
"""


@dataclass(frozen=True)
class Concept:
    """One emoji. `code`: its code points in hexadecimal, without variation selectors; `text`: label and
    keywords.
    """

    code: str
    text: str
    seen: bool


def prepare_emoji(root: Path, say: Say, cache: Path | None = None) -> Prepared:
    """Fill `root` with `train/` and `test/`, each a folder of PNG files and a table of them.

    The columns of `train/train.tsv` are file, text and concept (a number, the same in both tables);
    `test/test.tsv` has one more, `seen`: 1 where the concept is in the training set, else 0. Errors as for
    `fetch` and `prepare`.
    """

    def write(partial: Path) -> tuple[int, int]:
        archives = [fetch(package, say, cache) for package in (TWITTER, GOOGLE, WORDS)]
        say("reading pictures and words")
        train_pictures = read_pictures(archives[0], TRAIN_STYLE)
        test_pictures = read_pictures(archives[1], TEST_STYLE)
        concepts = choose_concepts(
            read_words(archives[2]), train_pictures, test_pictures, num_unseen=NUM_UNSEEN
        )
        seen = _write_set(partial / "train", concepts, train_pictures, testing=False)
        everything = _write_set(partial / "test", concepts, test_pictures, testing=True)
        (partial / ATTRIBUTION_FILE).write_text(ATTRIBUTION, encoding="ascii")
        return seen, everything

    return prepare(root, "emoji", VERSION, (TWITTER, GOOGLE, WORDS), write)


def read_pictures(archive: Path, style: str) -> dict[str, bytes]:
    """PNG files of one style by code; errors as for `read_tar`."""
    wanted = re.compile(rf"package/img/{style}/64/[0-9a-f]+(-[0-9a-f]+)*\.png")
    files = read_tar(archive, wanted, _PICTURE_LIMITS)
    return {plain_code(Path(name).stem): data for name, data in files.items()}


def read_words(archive: Path) -> list[dict[str, Any]]:
    """The English entries of emojibase (`hexcode`, `label`, `tags`); raises `DataError` where they are not a
    list.
    """
    files = read_tar(archive, re.compile(re.escape(_WORDS_FILE)), _WORDS_LIMITS)
    try:
        entries = json.loads(files.get(_WORDS_FILE, b"null"))
    except ValueError as error:
        raise DataError(
            f"{archive}: {_WORDS_FILE} is not JSON: {error}; delete the archive and run again"
        ) from error
    if not isinstance(entries, list):
        raise DataError(
            f"{archive}: {_WORDS_FILE} is missing or not a list; delete the archive and run again"
        )
    return entries


def choose_concepts(
    entries: list[dict[str, Any]], *styles: Mapping[str, bytes], num_unseen: int
) -> list[Concept]:
    """The concepts drawn in every style, in order of their codes.

    Unseen are the `num_unseen` whose codes have the smallest SHA-256: a draw that nobody made and that stays
    the same.
    """
    texts = {plain_code(entry["hexcode"]): text_of(entry) for entry in entries}
    codes = [code for code in sorted(texts) if all(code in style for style in styles)]
    unseen = set(sorted(codes, key=lambda code: hashlib.sha256(code.encode()).digest())[:num_unseen])
    return [Concept(code, texts[code], code not in unseen) for code in codes]


def plain_code(code: str) -> str:
    """A code as both packages can be compared by: upper case, without FE0F, which asks for colour and which
    one omits.
    """
    return "-".join(part for part in code.upper().split("-") if part != "FE0F")


def text_of(entry: dict[str, Any]) -> str:
    """Label and keywords in one line."""
    return " ".join(" ".join([entry["label"], *entry.get("tags", [])]).split())


def _write_set(folder: Path, concepts: list[Concept], pictures: Mapping[str, bytes], testing: bool) -> int:
    """Write one folder with its table; returns the number of samples."""
    folder.mkdir()
    rows: list[tuple[str | int, ...]] = []
    for number, concept in enumerate(concepts):
        if not (testing or concept.seen):
            continue
        name = f"{concept.code.lower()}.png"
        (folder / name).write_bytes(pictures[concept.code])
        row = (name, concept.text, number)
        rows.append((*row, int(concept.seen)) if testing else row)
    with (folder / f"{folder.name}.tsv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(_COLUMNS if testing else _COLUMNS[:-1])
        table.writerows(rows)
    return len(rows)
