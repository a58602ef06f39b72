"""Tar archives of class folders, and WebDataset shards."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.opening import open_source
from hpctrain.h5.options import PackOptions, SourceOptions
from hpctrain.h5.pack import pack_path
from hpctrain.h5.picture import decode_image
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.tar_members import TarMembers
from tests.h5.picture_files import picture, read_each, write_tar

CIFAR = Path(__file__).parents[2].parent / "shared" / "data" / "cifar10-jpeg.tar"
TREE = {
    f"photos/{name}/{i}.png": picture(10 * k + i) for k, name in enumerate(("ant", "bee")) for i in range(3)
}


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def samples(count: int) -> dict[str, bytes]:
    """Members of WebDataset samples with every kind of part."""
    members: dict[str, bytes] = {}
    for i in range(count):
        members |= {
            f"{i:04}.png": picture(i),
            f"{i:04}.cls": b"%d\n" % (i % 3),
            f"{i:04}.txt": f"caption é {i}".encode(),
            f"{i:04}.json": json.dumps(
                {"width": i, "score": i / 2, "url": f"u{i}", "ok": i % 2 == 0}
            ).encode(),
            f"{i:04}.npy": npy(np.arange(i % 4)),
            f"{i:04}.emb.npy": npy(np.full(4, i, np.float32)),
        }
    return members


class TestTree:
    """`FOLDER/CLASS/NAME.jpg`, as `tar` makes it of class folders."""

    def test_the_packed_set_is_that_of_the_folder(self, tmp_path: Path) -> None:
        members = {
            **TREE,
            "photos/bee/10.png": picture(99),
            "photos/bee/deep/x.jpg": picture(98, kind="JPEG"),
        }
        for name, data in members.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
        shuffled = sorted(members.items(), key=lambda item: item[1])
        tar = write_tar(tmp_path / "x.tar", shuffled)
        for keep in (False, True):
            how, options = SourceOptions(keep_encoded=keep), PackOptions(chunk_samples=3, overwrite=True)
            folder = pack_path(tmp_path / "photos", tmp_path / "a", options, how)
            packed = pack_path(tar, tmp_path / "b", options, how)
            assert packed.identity == folder.identity
            assert packed.num_samples == 8

    @pytest.mark.parametrize(
        ("names", "classes"),
        [
            (["a/1.jpg", "b/1.jpg"], ("a", "b")),
            (["./a/1.jpg", "./b/1.JPG"], ("a", "b")),
            (["x/y/a/1.jpg", "x/y/b/1.jpg", "x/y/b/deep/2.jpg"], ("a", "b")),
            (["x/a/1.jpg", "x/a/2.jpg"], ("a",)),
            (["a/photo.1.jpg", "a/photo.2.jpg", "b/photo.1.jpg"], ("a", "b")),
            (["train/1.jpg"], ("train",)),
        ],
    )
    def test_classes(self, tmp_path: Path, names: list[str], classes: tuple[str, ...]) -> None:
        source = open_source(write_tar(tmp_path / "x.tar", {name: picture(kind="JPEG") for name in names}))
        assert source.classes == classes
        assert source.num_samples == len(names)
        assert source.warnings == ()

    def test_of_splits_the_classes_lie_one_deeper(self, tmp_path: Path) -> None:
        members = {
            f"root/{split}/{name}/1.png": picture() for split in ("train", "test") for name in ("ant", "bee")
        }
        tar = write_tar(tmp_path / "x.tar", members)
        source = open_source(tar)
        assert (source.classes, source.num_samples) == (("ant", "bee"), 4)
        assert source.warnings == (
            f"{tar}: test and train are joined, and the folders in them are the classes; for one of them alone pack "
            f"{tar}/root/test",
        )
        one = open_source(tar / "root/test")
        assert (one.classes, one.num_samples, one.warnings) == (("ant", "bee"), 2, ())

    def test_a_folder_in_the_archive(self, tmp_path: Path) -> None:
        tar = write_tar(tmp_path / "x.tar", TREE)
        assert open_source(tar / "photos/ant").classes == ("ant",)
        with pytest.raises(UsageError, match=r"x.tar has no folder 'phot'; name one that it has"):
            open_source(tar / "phot")
        with pytest.raises(UsageError, match="there is no such file or folder"):
            open_source(tmp_path / "y.tar" / "photos")

    def test_pictures_beside_the_classes(self, tmp_path: Path) -> None:
        tar = write_tar(tmp_path / "x.tar", {**TREE, "photos/stray.png": picture()})
        with pytest.raises(DataError, match=r"photos/stray.png lies beside the folders of the classes"):
            open_source(tar)

    def test_other_files_are_named_and_hidden_ones_left_out(self, tmp_path: Path) -> None:
        more = {
            "photos/README": b"x",
            "photos/ant/._0.png": b"x",
            "__MACOSX/photos/ant/0.png": b"x",
            ".git/a.png": b"",
        }
        source = open_source(write_tar(tmp_path / "x.tar", {**TREE, **more}))
        assert source.num_samples == 6
        assert len(source.warnings) == 1
        assert "1 files that are no images are left out" in source.warnings[0]
        assert "photos/README" in source.warnings[0]

    @pytest.mark.skipif(not CIFAR.exists(), reason=f"{CIFAR} is not there")
    def test_real_pictures(self, tmp_path: Path) -> None:
        """The beginning of CIFAR-10, cut off where a member ends."""
        with tarfile.open(CIFAR) as archive:
            wanted = {}
            while (member := archive.next()) is not None and len(wanted) < 1100:
                stream = archive.extractfile(member)
                if stream is not None:
                    wanted[member.name] = stream.read()
            assert member is not None
            end = member.offset
        with CIFAR.open("rb") as file:
            (tmp_path / "x.tar").write_bytes(file.read(end) + bytes(1024))
        source = open_source(tmp_path / "x.tar")
        assert source.classes == ("airplane", "automobile")
        columns = source.read(990, 1100)
        assert columns["label"].tolist() == [0] * 10 + [1] * 100  # type: ignore[union-attr]
        for image, name in zip(columns["image"], sorted(wanted)[990:], strict=True):  # type: ignore[arg-type]
            assert np.array_equal(image, np.asarray(Image.open(io.BytesIO(wanted[name]))))


class TestWebDataset:
    """Samples of consecutive members with one key."""

    def test_every_part_becomes_a_field(self, tmp_path: Path) -> None:
        source = open_source(write_tar(tmp_path / "x.tar", samples(9)))
        assert {
            name: (field.kind, field.dtype.str, field.sample_shape) for name, field in source.fields.items()
        } == {
            "data": ("ragged", "<i8", ()),
            "emb": ("dense", "<f4", (4,)),
            "image": ("dense", "|u1", (6, 5, 3)),
            "label": ("dense", "<i8", ()),
            "ok": ("dense", "|u1", ()),
            "score": ("dense", "<f8", ()),
            "text": ("ragged", "|u1", ()),
            "url": ("ragged", "|u1", ()),
            "width": ("dense", "<i8", ()),
        }
        columns = source.read(2, 7)
        assert columns["label"].tolist() == [2, 0, 1, 2, 0]  # type: ignore[union-attr]
        assert columns["score"].tolist() == [1, 1.5, 2, 2.5, 3]  # type: ignore[union-attr]
        assert columns["ok"].tolist() == [1, 0, 1, 0, 1]  # type: ignore[union-attr]
        assert columns["emb"][1].tolist() == [3] * 4  # type: ignore[index]
        text, data = columns["text"], columns["data"]
        assert isinstance(text, Ragged)
        assert isinstance(data, Ragged)
        assert [text.text(i) for i in range(5)] == [f"caption é {i}" for i in range(2, 7)]
        assert [data.row(i).tolist() for i in range(5)] == [list(range(i % 4)) for i in range(2, 7)]
        for row, image in enumerate(columns["image"]):  # type: ignore[arg-type]
            assert np.array_equal(image, decode_image(picture(row + 2), "x"))

    def test_a_folder_of_shards_compressed_or_not(self, tmp_path: Path) -> None:
        whole = list(samples(12).items())
        for number, mode in enumerate(("w", "w:gz", "w:bz2", "w:xz")):
            suffix = mode.replace("w", "").replace(":", ".")
            write_tar(tmp_path / "raw" / f"{number}.tar{suffix}", whole[18 * number : 18 * number + 18], mode)
        (tmp_path / "raw" / "index.txt").write_text("x")
        source = open_source(tmp_path / "raw")
        joined = open_source(write_tar(tmp_path / "x.tar", whole))
        assert source.warnings == ("1 other files are left out (first: index.txt)",)
        for name, column in source.read(1, 11).items():
            wanted = joined.read(1, 11)[name]
            if isinstance(column, Ragged):
                assert isinstance(wanted, Ragged)
                assert np.array_equal(column.offsets, wanted.offsets)
                column, wanted = column.values, wanted.values
            assert np.array_equal(column, wanted)  # type: ignore[arg-type]

    def test_a_sample_does_not_go_on_in_the_next_shard(self, tmp_path: Path) -> None:
        write_tar(tmp_path / "raw" / "a.tar", {"0.txt": b"a"})
        write_tar(tmp_path / "raw" / "b.tar", {"0.txt": b"b"})
        assert open_source(tmp_path / "raw").num_samples == 2

    def test_joined_splits_are_told(self, tmp_path: Path) -> None:
        for name in ("train-0.tar", "train-1.tar", "val-0.tar"):
            write_tar(tmp_path / "raw" / name, {"0.txt": b"a"})
        assert open_source(tmp_path / "raw").warnings == (
            f"{tmp_path / 'raw'}: train and val are joined; to keep them apart, pack each from a folder of its own",
        )

    def test_what_stands_before_the_last_dot_names_the_field(self, tmp_path: Path) -> None:
        members = {"0.left.png": picture(0), "0.right.png": picture(1), "0.cls": b"1"}
        assert list(open_source(write_tar(tmp_path / "x.tar", members)).fields) == ["label", "left", "right"]

    def test_pictures_are_scaled_or_kept(self, tmp_path: Path) -> None:
        tar = write_tar(tmp_path / "x.tar", samples(3))
        assert open_source(tar, SourceOptions(size=4, gray=True)).fields["image"].sample_shape == (4, 4)
        kept = open_source(tar, SourceOptions(keep_encoded=True))
        assert kept.fields["image"].encoding == "image"
        images = kept.read(0, 3)["image"]
        assert isinstance(images, Ragged)
        assert images.row(1).tobytes() == picture(1)
        assert kept.num_values("image") == sum(len(picture(i)) for i in range(3))

    def test_members_that_cannot_be_packed_are_left_out(self, tmp_path: Path) -> None:
        members = {"README": b"x", "0.txt": b"a", "0.pickle": b"x", "1.txt": b"b", "2.mp4": b"x"}
        source = open_source(write_tar(tmp_path / "x.tar", members))
        assert source.num_samples == 2
        assert [warning.partition(":")[0] for warning in source.warnings] == [
            f"1 members that end in {ending!r} are left out" for ending in ("", "pickle", "mp4")
        ]

    def test_names_in_json_that_make_no_field(self, tmp_path: Path) -> None:
        rows = [
            {
                "a": 1,
                "mixed": 1,
                "none": None,
                "id": 4,
                "nested": {"x": 1},
                "list": [1, 2],
                "long": [1],
                "big": 2**70,
            },
            {
                "a": 2.5,
                "mixed": "x",
                "none": None,
                "id": 5,
                "nested": {"x": 2},
                "list": [3, 4],
                "long": [],
                "big": 1,
            },
        ]
        tar = write_tar(
            tmp_path / "x.tar", {f"{i}.json": json.dumps(row).encode() for i, row in enumerate(rows)}
        )
        source = open_source(tar)
        assert {name: (f.kind, f.dtype.str, f.sample_shape) for name, f in source.fields.items()} == {
            "a": ("dense", "<f8", ()),
            "list": ("dense", "<i8", (2,)),
            "long": ("ragged", "<i8", ()),
        }
        assert source.warnings[0].startswith(
            "5 names in .json are left out ('mixed', 'none', 'id'): not in all"
        )
        assert source.read(0, 2)["a"].tolist() == [1, 2.5]  # type: ignore[union-attr]

    def test_bad_samples_are_told_one_by_one(self, tmp_path: Path) -> None:
        members = samples(12)
        whole = members["0002.png"]
        members |= {
            "0001.cls": b"cat",
            "0002.png": whole[: len(whole) // 2],
            "0003.txt": b"\xff\xfe",
            "0004.json": b'{"width": "wide", "score": 1, "url": "u", "ok": true}',
            "0005.npy": b"\x93NUMPY",
            "0006.emb.npy": npy(np.zeros(5, np.float32)),
        }
        del members["0007.txt"]
        source = open_source(write_tar(tmp_path / "x.tar", members))
        columns, good, bad = read_each(source)
        assert good == [0, 8, 9, 10, 11]
        assert columns["width"].tolist() == [0, 8, 9, 10, 11]  # type: ignore[union-attr]
        assert columns["image"].shape == (5, 6, 5, 3)  # type: ignore[union-attr]
        wanted = [
            "0001.cls: 'cat' is no whole number",
            "0002.png: does not decode as an image",
            "0003.txt: is no text in UTF-8",
            "0004.json: 'width' is \"wide\", but in others int64 of ()",
            "0005.npy: cannot be read as an array of numbers",
            "0006.emb.npy: float32 of (5,), but others have float32 of (4,)",
            "the sample has no .txt, as others have",
        ]
        assert list(bad) == list(range(1, 8))
        for message, part in zip(bad.values(), wanted, strict=True):
            assert part in message
        with pytest.raises(DataError, match=r"0001.cls: 'cat' is no whole number"):
            source.read(0, 3)

    def test_a_number_beyond_all_floats_is_bad(self, tmp_path: Path) -> None:
        huge = b'{"x": [0.5, 1' + b"0" * 400 + b"]}"
        members = {f"{i}.json": b'{"x": [0.5, 1]}' for i in range(600)} | {
            "6.json": huge
        }  # not looked at before
        bad = read_each(open_source(write_tar(tmp_path / "x.tar", members)))[2]
        assert list(bad) == [6]
        assert "6.json: 'x' is [0.5, 1000" in bad[6]

    def test_the_first_picture_may_be_bad(self, tmp_path: Path) -> None:
        source = open_source(
            write_tar(
                tmp_path / "x.tar",
                {"0.png": b"junk", "0.cls": b"0", **{"1.cls": b"1", "2.png": picture(), "2.cls": b"2"}},
            )
        )
        assert source.fields["image"].sample_shape == (6, 5, 3)
        assert read_each(source)[1] == [2]

    def test_a_picture_of_another_size_is_not_a_bad_one(self, tmp_path: Path) -> None:
        members = {"0.png": picture(), "0.cls": b"0", "1.png": picture(shape=(7, 5, 3)), "1.cls": b"0"}
        source = open_source(write_tar(tmp_path / "x.tar", members))
        with pytest.raises(DataError, match=r"1.png: 5 x 7 pixels, but .*0.png has 5 x 6; give --size N"):
            read_each(source)

    @pytest.mark.parametrize(
        ("members", "message"),
        [
            ([("0.txt", b""), ("0.txt", b"")], r"x.tar: 0.txt: the sample has two members that end in 'txt'"),
            ([("0.txt", b"a"), ("0.json", b'{"text": "b"}')], r"makes a field 'text', which another member"),
            ([("0.bin", b"a")], r"x.tar: 0.bin: neither this member nor another is a picture, .cls"),
            ([("0.json", b"[1]")], r"0.json: is JSON of list, not an object"),
            ([("0.npy", npy(np.array([{}]), allow_pickle=True))], r"0.npy: cannot be read as an array"),
            (
                [("0.npy", npy(np.zeros((2, 2)))), ("1.npy", npy(np.zeros(3)))],
                r"have shapes \(2, 2\) and \(3,\)",
            ),
            (
                [("0.npy", npy(np.zeros(2))), ("1.npy", npy(np.zeros(3)))],
                r"rows of any length and type float64",
            ),
            ([(f"{i}.x{i}.txt", b"") for i in range(65)], r"x64.txt: more than 64 endings of names"),
            ([], r"x.tar: holds no files to pack"),
        ],
    )
    def test_archives_that_make_no_samples(
        self, tmp_path: Path, members: list[tuple[str, bytes]], message: str
    ) -> None:
        with pytest.raises(DataError, match=message):
            open_source(write_tar(tmp_path / "x.tar", members))

    def test_field_is_for_others(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="--field is for HDF5 files"):
            open_source(write_tar(tmp_path / "x.tar", {"0.txt": b""}), SourceOptions(fields=("a",)))


class TestBounds:
    """What an archive must not do."""

    @pytest.mark.parametrize("name", ["/etc/a.txt", "../a.txt", "a/../../b.txt"])
    def test_names_that_lead_out(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(DataError, match=rf"x.tar: the entry '{name}' points out of the archive"):
            open_source(write_tar(tmp_path / "x.tar", {"0.txt": b"", name: b""}))

    @pytest.mark.parametrize(
        ("kind", "word"), [(b"1", "a link"), (b"2", "a link"), (b"3", "a device"), (b"6", "a device")]
    )
    def test_what_is_no_plain_file(self, tmp_path: Path, kind: bytes, word: str) -> None:
        with tarfile.open(tmp_path / "x.tar", "w") as archive:
            info = tarfile.TarInfo("0.txt")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        with pytest.raises(DataError, match=rf"x.tar: the entry '0.txt' is {word}, not a plain file"):
            open_source(tmp_path / "x.tar")

    def test_too_many_entries(self, tmp_path: Path) -> None:
        tar = write_tar(tmp_path / "x.tar", {f"{i}.txt": b"" for i in range(11)})
        with pytest.raises(
            DataError, match=r"more than 10 entries \(first beyond: '10.txt'\); allow more with"
        ):
            open_source(tar, SourceOptions(max_entries=10))
        assert open_source(tar, SourceOptions(max_entries=11)).num_samples == 11

    @pytest.mark.parametrize("mode", ["w", "w:gz"])
    def test_too_many_bytes(self, tmp_path: Path, mode: str) -> None:
        tar = write_tar(tmp_path / "x.tar", {"0.txt": bytes(1 << 20), "1.txt": b""}, mode)
        with pytest.raises(
            DataError, match=r"x.tar: unpacks to more than 0.0009.* GiB.*; allow more with --max-arch"
        ):
            open_source(tar, SourceOptions(max_archive_gib=0.0009))

    def test_headers_that_ask_for_much_memory(self, tmp_path: Path) -> None:
        """A long name of 8 GB, and a file that is large enough for it."""
        info = tarfile.TarInfo("././@LongLink")
        info.type, info.size = tarfile.GNUTYPE_LONGNAME, 8 << 30
        (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
        os.truncate(tmp_path / "x.tar", 9 << 30)
        with pytest.raises(DataError, match=r"a header of 8589934592 bytes, but the bound is 1048576"):
            open_source(tmp_path / "x.tar")

    @pytest.mark.parametrize("kind", [b"x", b"g", b"L"])
    def test_headers_without_entries(self, tmp_path: Path, kind: bytes) -> None:
        """`tarfile` calls itself for each; one after the other they would be as deep as the archive is long."""
        info, words = tarfile.TarInfo("more"), b"13 comment=x\n" if kind != b"L" else b"name\0"
        info.type, info.size = kind, len(words)
        (tmp_path / "x.tar").write_bytes((info.tobuf() + words.ljust(512, b"\0")) * 2000)
        with pytest.raises(DataError, match=r"x.tar: has extended headers one behind the other"):
            open_source(tmp_path / "x.tar")

    def test_a_text_as_large_as_a_film(self, tmp_path: Path) -> None:
        info = tarfile.TarInfo("0.txt")
        info.size = 2 << 30
        (tmp_path / "x.tar").write_bytes(info.tobuf())
        os.truncate(tmp_path / "x.tar", (2 << 30) + 2048)
        with pytest.raises(
            DataError, match=r"0.txt: 2147483648 bytes, but the bound of one value is 1073741824"
        ):
            open_source(tmp_path / "x.tar").read(0, 1)

    def test_pictures_with_too_many_pixels(self, tmp_path: Path) -> None:
        source = open_source(write_tar(tmp_path / "x.tar", samples(2)), SourceOptions(max_pixels=29, size=4))
        assert "0000.png: 30 pixels, but the bound is 29" in read_each(source)[2][0]


def hidden(name: str) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


class TestHeaders:
    """Members are found where `tarfile` finds them, whatever the format."""

    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        names=st.lists(
            st.text("aé/ .\udc80", min_size=1, max_size=130).filter(lambda name: name.strip("/. ")),
            max_size=5,
        ),
        kind=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
        size=st.integers(0, 1500),
    )
    def test_of_every_format(self, tmp_path: Path, names: list[str], kind: int, size: int) -> None:
        with tarfile.open(tmp_path / "x.tar", "w", format=kind) as archive:
            for number, name in enumerate(names):
                info = tarfile.TarInfo(f"{number}/{name}/x")
                info.size = size + number
                with contextlib.suppress(ValueError):  # too long for this format
                    archive.addfile(info, io.BytesIO(bytes([number]) * info.size))
        with tarfile.open(tmp_path / "x.tar") as archive:
            wanted = {item.name: item.size for item in archive}
        if any(".." in name.split("/") for name in wanted):
            with pytest.raises(DataError, match="points out of the archive"):
                TarMembers([tmp_path / "x.tar"], SourceOptions())
            return
        members = TarMembers([tmp_path / "x.tar"], SourceOptions())
        found = {members.name(i): members.read(i) for i in range(len(members))}
        assert {name: len(data) for name, data in found.items()} == {
            "/".join(part for part in name.split("/") if part not in ("", ".")): size
            for name, size in wanted.items()
            if not hidden(name)
        }
        assert all(data == bytes([int(name.partition("/")[0])]) * len(data) for name, data in found.items())


class TestDamage:
    """Archives that are cut off, changed or no archives."""

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_cut_off_anywhere_it_is_told(self, tmp_path: Path, data: st.DataObject) -> None:
        tar = write_tar(tmp_path / "x.tar", {f"{i}.txt": b"x" * (300 * i) for i in range(5)})
        end = 512 * (5 + sum(-(-300 * i // 512) for i in range(5)))  # where the end mark begins
        os.truncate(tar, data.draw(st.integers(0, end + 511)))
        with pytest.raises(DataError, match=r"x.tar: .*(cut off|not a whole tar archive)"):
            open_source(tar)

    @pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
    def test_compressed_ones_cut_off_or_damaged(self, tmp_path: Path, mode: str) -> None:
        tar = write_tar(tmp_path / "x.tar", {"0.txt": os.urandom(5000)}, mode)
        whole = tar.read_bytes()
        tar.write_bytes(whole[:-200])
        with pytest.raises(DataError, match=r"x.tar: damaged"):
            open_source(tar)
        tar.write_bytes(whole[:2000] + bytes(100) + whole[2100:])
        with pytest.raises(DataError, match=r"x.tar: damaged"):
            open_source(tar)

    def test_a_damaged_header_does_not_end_the_archive(self, tmp_path: Path) -> None:
        tar = write_tar(tmp_path / "x.tar", {f"{i}.txt": b"x" for i in range(5)})
        raw = bytearray(tar.read_bytes())
        raw[2048 + 150] ^= 1
        tar.write_bytes(raw)
        with pytest.raises(DataError, match=r"x.tar: the header at byte 2048 is damaged"):
            open_source(tar)

    def test_archives_joined_with_cat(self, tmp_path: Path) -> None:
        tar = write_tar(tmp_path / "x.tar", {"0.txt": b"x"})
        tar.write_bytes(tar.read_bytes() * 2)
        with pytest.raises(
            DataError, match=r"x.tar: goes on behind the end mark at byte 1024, .* with `cat` do"
        ):
            open_source(tar)

    @pytest.mark.parametrize(
        "content", [b"", b"no archive", b"PK\x03\x04" + bytes(2000), b"\x1f\x8b", bytes(511)]
    )
    def test_other_files(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x.tar").write_bytes(content)
        with pytest.raises(DataError, match=r"x.tar: "):
            open_source(tmp_path / "x.tar")

    def test_one_that_changes(self, tmp_path: Path) -> None:
        tar = write_tar(tmp_path / "x.tar", {"0.txt": b"a"})
        source = open_source(tar)
        write_tar(tar, {"0.txt": b"bb", "1.txt": b"c"})
        with pytest.raises(DataError, match=r"x.tar: changed since this run looked at it"):
            source.read(0, 1)
        with pytest.raises(DataError, match=r"x.tar: changed since"):  # not a sample that could be dropped
            read_each(source)

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "x.tar")
        with pytest.raises((DataError, StorageError), match=r"x.tar: "):
            open_source(tmp_path / "x.tar")

    def test_no_room_to_unpack(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tar = write_tar(tmp_path / "x.tar", {"0.txt": bytes(100)}, "w:gz")
        # /dev/full gives the error of a full disk.
        monkeypatch.setattr("tempfile.TemporaryFile", partial(Path("/dev/full").open, "wb", buffering=0))
        with pytest.raises(
            StorageError, match=r"x.tar cannot be unpacked there: No space left .*; set TMPDIR to"
        ):
            open_source(tar)


def test_it_is_told_how_far_the_archives_are_read(tmp_path: Path) -> None:
    plain = write_tar(tmp_path / "raw" / "a.tar", {f"{i}.txt": b"" for i in range(1500)})
    packed = write_tar(tmp_path / "raw" / "b.tar.gz", {f"{i}.txt": bytes(2 << 20) for i in range(2)}, "w:gz")
    told: list[tuple[Any, ...]] = []
    open_source(tmp_path / "raw", SourceOptions(opening=lambda *call: told.append(call)))
    assert {call[0] for call in told} == {"unpacking", "reading headers"}
    unpacking = [call[1:] for call in told if call[0] == "unpacking"]
    assert len(unpacking) > 3
    assert unpacking[-1] == (packed.stat().st_size, packed.stat().st_size, "b.tar.gz")
    reading = [call[1:] for call in told if call[0] == "reading headers"]
    assert [found for _, _, found in reading] == ["1024 files", "1500 files", "1502 files"]
    assert reading[0][0] == 1024 * 512
    assert reading[1][0] == plain.stat().st_size
    assert reading[2][0] == reading[2][1] > plain.stat().st_size + (4 << 20)


def test_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    tar = write_tar(tmp_path / "x.tar.gz", samples(3), "w:gz")
    source = open_source(tar)
    assert source.read(1, 2)["label"].tolist() == [1]  # type: ignore[union-attr]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_many_shards_few_open_files(tmp_path: Path) -> None:
    """More archives than are kept open, read from several threads; each descriptor is closed in the end."""
    for i in range(150):
        write_tar(tmp_path / "raw" / f"{i:03}.tar", {"0.txt": b"%d" % i})
    members = TarMembers(sorted((tmp_path / "raw").iterdir()), SourceOptions())
    barrier = threading.Barrier(4)

    def read(members: TarMembers, part: int) -> list[bytes]:
        barrier.wait(10)
        return [members.read(i) for i in range(part, 150, 4)]

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(read, [members] * 4, range(4)))
    assert parts == [[b"%d" % i for i in range(part, 150, 4)] for part in range(4)]
    assert 0 < open_files(tmp_path) <= 64
    del members
    assert open_files(tmp_path) == 0


def open_files(folder: Path) -> int:
    """How many files below a folder this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            count += link.readlink().is_relative_to(folder)
    return count
