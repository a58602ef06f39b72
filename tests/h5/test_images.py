"""Folders of pictures."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.opening import open_source
from hpctrain.h5.pack import PackOptions, SourceOptions, pack, pack_path
from hpctrain.h5.packed import open_packed
from hpctrain.h5.picture import MAX_PIXELS, decode_image, load_image
from hpctrain.h5.reader import FileSource, Ragged, read_sample_chunk
from tests.h5.picture_files import read_each

CIFAR = Path(__file__).parents[2].parent / "shared" / "data" / "cifar10-jpeg.tar"


def picture(path: Path, shape: tuple[int, ...] = (6, 5, 3), seed: int = 0) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def read_all(root: Path) -> dict[str, np.ndarray]:
    packed = open_packed(root)
    with FileSource() as source:
        parts = [read_sample_chunk(packed, source, chunk) for chunk in range(len(packed.chunk_sizes))]
    columns: dict[str, np.ndarray] = {}
    for name in packed.fields:
        values = [part[name] for part in parts]
        assert not any(isinstance(value, Ragged) for value in values)
        columns[name] = np.concatenate(values)
    return columns


def test_class_folders_become_images_and_labels(tmp_path: Path) -> None:
    wanted = []
    for label, name in enumerate(["ant", "bee", "cat"]):
        for i in range(4):
            pixels = picture(tmp_path / "raw" / name / f"{i}.png", seed=10 * label + i)
            wanted.append((label, pixels))
    picture(tmp_path / "raw" / "bee" / "more" / "deep.BMP", seed=99)
    (tmp_path / "raw" / ".hidden").mkdir()
    (tmp_path / "raw" / "cat" / ".DS_Store").write_text("x")
    (tmp_path / "raw" / "cat" / "notes.txt").write_text("x")
    report = pack_path(tmp_path / "raw", tmp_path / "set", PackOptions(chunk_samples=3))
    assert open_packed(tmp_path / "set").classes == ("ant", "bee", "cat")
    columns = read_all(tmp_path / "set")
    assert columns["label"].tolist() == [0] * 4 + [1] * 5 + [2] * 4
    images_NHWC = np.delete(columns["image"], 8, axis=0)
    assert np.array_equal(images_NHWC, np.stack([pixels for _, pixels in wanted]))
    assert len(report.warnings) == 1
    assert "1 files that are no images are left out (first: " in report.warnings[0]
    assert "notes.txt" in report.warnings[0]


def test_gray_and_size(tmp_path: Path) -> None:
    picture(tmp_path / "raw" / "a" / "1.png", (40, 30, 3))
    picture(tmp_path / "raw" / "a" / "2.png", (16, 64, 3))
    source = open_source(tmp_path / "raw", SourceOptions(size=8, gray=True))
    assert source.fields["image"].sample_shape == (8, 8)
    assert open_source(tmp_path / "raw", SourceOptions(size=8)).fields["image"].sample_shape == (8, 8, 3)


def test_scaling_is_antialiased(tmp_path: Path) -> None:
    """A fine checkerboard becomes gray, not a pattern of black and white."""
    board = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)
    Image.fromarray(board).save(tmp_path / "board.png")
    scaled = load_image(tmp_path / "board.png", 8, gray=True)
    assert scaled.min() > 100
    assert scaled.max() < 155


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_become_white(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((1, 1), (10, 10, 10, 255))
    image.convert(mode).save(tmp_path / "x.png")
    pixels = load_image(tmp_path / "x.png", None, gray=False)
    assert pixels.shape == (4, 4, 3)
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[1, 1].max() < 20


def test_the_orientation_of_the_camera_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise by 90 degrees
    Image.new("RGB", (8, 4)).save(tmp_path / "x.jpg", exif=exif)
    assert load_image(tmp_path / "x.jpg", None, gray=False).shape == (8, 4, 3)


@pytest.mark.parametrize("content", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 50])
def test_what_does_not_decode_is_named(tmp_path: Path, content: bytes) -> None:
    for i in range(5):
        picture(tmp_path / "raw" / "a" / f"{i}.png")
    (tmp_path / "raw" / "a" / "3.png").write_bytes(content)
    with pytest.raises(DataError, match=r"3.png: does not decode as an image .*; repair or remove it"):
        pack_path(tmp_path / "raw", tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".bmp", ".webp", ".tif"])
def test_truncated_pictures_are_named(tmp_path: Path, suffix: str) -> None:
    picture(tmp_path / f"x{suffix}", (50, 60, 3))
    whole = (tmp_path / f"x{suffix}").read_bytes()
    (tmp_path / f"x{suffix}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"x{suffix}: does not decode"):
        load_image(tmp_path / f"x{suffix}", None, gray=False)


@pytest.mark.parametrize("name", ["x.png", "x.jpg"])
def test_too_many_pixels(tmp_path: Path, name: str) -> None:
    picture(tmp_path / "raw" / "a" / name)
    with pytest.raises(DataError, match=rf"{name}: 30 pixels, but the bound is 29; scale"):
        pack_path(tmp_path / "raw", tmp_path / "set", how=SourceOptions(max_pixels=29))
    pack_path(tmp_path / "raw", tmp_path / "set", how=SourceOptions(max_pixels=30))


@pytest.mark.parametrize("side", [10_000, 20_000])
def test_pictures_that_claim_to_be_huge(tmp_path: Path, side: int) -> None:
    """Beyond Pillow's limit, and beyond twice of it, by the header alone."""
    Image.new("L", (1, 1)).save(tmp_path / "x.bmp")
    raw = bytearray((tmp_path / "x.bmp").read_bytes())
    raw[18:26] = side.to_bytes(4, "little") * 2
    (tmp_path / "x.bmp").write_bytes(raw)
    with pytest.raises(DataError, match=r"x.bmp: .*; scale the image down, or remove it"):
        load_image(tmp_path / "x.bmp", None, gray=False)


def test_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((3, 3), 40_000, np.uint16)).save(tmp_path / "x.png")
    with pytest.raises(DataError, match=r"x.png: has pixels of more than 8 bits .*; convert it"):
        load_image(tmp_path / "x.png", None, gray=False)


def test_a_picture_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "x.png").symlink_to(tmp_path / "x.png")
    with pytest.raises(StorageError, match=r"x.png: cannot be read: Too many levels of symbolic links"):
        load_image(tmp_path / "x.png", None, gray=False)


def test_a_folder_in_place_of_a_picture_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    with pytest.raises(DataError, match=r"x.png: does not decode as an image .*Is a directory"):
        load_image(tmp_path / "x.png", None, gray=False)


def test_differing_sizes_name_both_and_the_mend(tmp_path: Path) -> None:
    picture(tmp_path / "raw" / "a" / "1.png", (6, 5, 3))
    picture(tmp_path / "raw" / "a" / "2.png", (7, 5, 3))
    with pytest.raises(DataError, match=r"2.png: 5 x 7 pixels, but .*1.png has 5 x 6; give --size N"):
        pack_path(tmp_path / "raw", tmp_path / "set")


def test_folders_without_classes_or_pictures(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no class sub-folders \(0 other entries\)"):
        open_source(tmp_path)
    picture(tmp_path / "1.png")
    with pytest.raises(
        DataError, match=r"has no class sub-folders \(1 other entries\); put the images of each class"
    ):
        open_source(tmp_path)
    (tmp_path / "bee").mkdir()
    with pytest.raises(
        DataError, match=r"1.png lies beside the folders of the classes, .*; move it into one"
    ):
        open_source(tmp_path)
    (tmp_path / "1.png").unlink()
    with pytest.raises(DataError, match=r"bee: the class has no images"):
        open_source(tmp_path)


def test_nothing_of_a_folder_is_lost_unsaid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ant/1.png", "bee/deep/2.png", "bee/.cache/3.png", "__MACOSX/4.png", ".git/5.png"):
        picture(tmp_path / "raw" / name)
    (tmp_path / "raw" / "README").write_text("x")
    source = open_source(tmp_path / "raw")
    assert (source.classes, source.num_samples) == (("ant", "bee"), 2)
    assert source.warnings == (f"1 files that are no images are left out (first: {tmp_path}/raw/README)",)
    (tmp_path / "raw" / "bee" / "more").symlink_to(tmp_path / "raw" / "ant")
    with pytest.raises(DataError, match=r"bee/more is a link to a folder, which is not followed; move"):
        open_source(tmp_path / "raw")
    (tmp_path / "raw" / "bee" / "more").unlink()
    real = os.scandir

    def refusing(path: str) -> Any:
        if str(path).endswith("deep"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)  # nothing is refused to root, who may be running this
    with pytest.raises(StorageError, match=r"bee/deep: cannot be read: Permission denied; check permissions"):
        open_source(tmp_path / "raw")


def test_parts_of_a_data_set_that_look_like_classes(tmp_path: Path) -> None:
    for name in ("train/ant/1.png", "train/bee/2.png", "test/ant/3.png"):
        picture(tmp_path / "raw" / name)
    (warning,) = open_source(tmp_path / "raw").warnings
    assert "raw: test and train are taken for classes; if they are parts of a data set, pack each" in warning
    assert open_source(tmp_path / "raw" / "train").warnings == ()


def test_the_listing_is_told(tmp_path: Path) -> None:
    for name in ("ant/1.png", "ant/2.png", "bee/3.png"):
        picture(tmp_path / name)
    told: list[tuple[Any, ...]] = []
    open_source(tmp_path, SourceOptions(opening=lambda *call: told.append(call)))
    assert told == [("listing", 0, 2, "0 pictures"), ("listing", 1, 2, "2 pictures")]


def test_sizes_out_of_bounds(tmp_path: Path) -> None:
    picture(tmp_path / "raw" / "a" / "1.png")
    with pytest.raises(UsageError, match="size is 0, but must be at least 1"):
        open_source(tmp_path / "raw", SourceOptions(size=0))
    for size in (9460, 10**9):
        with pytest.raises(
            UsageError,
            match=rf"size is {size}, which makes {size**2} pixels, .* is 89478485; give at most 9459",
        ):
            open_source(tmp_path / "raw", SourceOptions(size=size))


def test_a_file_that_vanishes_is_a_data_error(tmp_path: Path) -> None:
    for i in range(3):
        picture(tmp_path / "raw" / "a" / f"{i}.png")
    source = open_source(tmp_path / "raw")
    (tmp_path / "raw" / "a" / "2.png").unlink()
    with pytest.raises(DataError, match=r"2.png: does not decode as an image .*No such file"):
        pack(source, tmp_path / "set")


class TestBadOnes:
    """Pictures that do not decode are told one by one."""

    def raw(self, root: Path) -> Path:
        for i in range(7):
            picture(root / "raw" / "ab"[i % 2] / f"{i}.png", seed=i)
        (root / "raw" / "a" / "0.png").write_bytes(b"junk")
        (root / "raw" / "b" / "3.png").write_bytes(b"")
        return root / "raw"

    @pytest.mark.parametrize("keep", [False, True])
    def test_of_a_folder(self, tmp_path: Path, keep: bool) -> None:
        source = open_source(self.raw(tmp_path), SourceOptions(keep_encoded=keep))
        columns, good, bad = read_each(source)
        assert good == [1, 2, 3, 4, 6]  # of a: 0, 2, 4, 6; of b: 1, 3, 5
        assert columns["label"].tolist() == [0, 0, 0, 1, 1]
        assert len(columns["image"]) == 5
        assert "a/0.png: " in bad[0]
        assert "b/3.png: " in bad[5]
        assert read_each(source, 1, 4)[1:] == ([1, 2, 3], {})

    def test_of_a_table(self, tmp_path: Path) -> None:
        raw = self.raw(tmp_path)
        (raw / "t.csv").write_text("file,text\na/0.png,none\na/2.png,two\nb/3.png,\nb/5.png,five\n")
        columns, good, bad = read_each(open_source(raw))
        assert (good, list(bad)) == ([1, 3], [0, 2])
        assert [columns["text"].text(i) for i in range(2)] == ["two", "five"]

    def test_all_of_them(self, tmp_path: Path) -> None:
        for i in range(3):
            picture(tmp_path / "raw" / "a" / f"{i}.png").fill(0)
            (tmp_path / "raw" / "a" / f"{i}.png").write_bytes(b"junk")
        with pytest.raises(DataError, match=r"a/0.png: does not decode"):
            open_source(tmp_path / "raw")
        columns, good, bad = read_each(open_source(tmp_path / "raw", SourceOptions(size=4)))
        assert (columns["image"].shape, good, list(bad)) == ((0, 4, 4, 3), [], [0, 1, 2])

    def test_one_of_another_size_is_none_of_them(self, tmp_path: Path) -> None:
        picture(tmp_path / "raw" / "a" / "0.png", (6, 5, 3))
        picture(tmp_path / "raw" / "a" / "1.png", (7, 5, 3))
        with pytest.raises(DataError, match="give --size N to scale"):
            read_each(open_source(tmp_path / "raw"))

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        picture(tmp_path / "raw" / "a" / "0.png")
        os.mkfifo(tmp_path / "raw" / "a" / "1.png")
        assert "1.png: is no regular file" in read_each(open_source(tmp_path / "raw"))[2][1]


def test_a_larger_bound_on_pixels_than_that_of_pillow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A bound of Pillow's that small pictures reach, which would be an error beyond twice of it.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    picture(tmp_path / "raw" / "a" / "0.png")
    assert open_source(tmp_path / "raw", SourceOptions(max_pixels=30)).read(0, 1)["image"].shape == (
        1,
        6,
        5,
        3,
    )


def test_bounds_on_pixels_agree() -> None:
    assert SourceOptions().max_pixels == MAX_PIXELS == Image.MAX_IMAGE_PIXELS


@pytest.mark.skipif(not CIFAR.exists(), reason=f"{CIFAR} is not there")
def test_real_pictures(tmp_path: Path) -> None:
    """A slice of CIFAR-10: every packed pixel is the one Pillow decodes."""
    with tarfile.open(CIFAR) as archive:
        for member in archive:
            if (
                member.name.startswith("test/")
                and member.isfile()
                and member.name.endswith(("00.jpg", "01.jpg"))
            ):
                archive.extract(member, tmp_path, filter="data")
            if member.name.startswith("train/"):
                break
    files = sorted((tmp_path / "test").glob("*/*.jpg"))
    assert len(files) > 100
    pack_path(tmp_path / "test", tmp_path / "set", PackOptions(codec="blosc-zstd", chunk_samples=16))
    shutil.move(tmp_path / "set", tmp_path / "moved")
    columns = read_all(tmp_path / "moved")
    packed = open_packed(tmp_path / "moved")
    assert packed.classes is not None
    assert [packed.classes[label] for label in columns["label"]] == [path.parent.name for path in files]
    assert np.array_equal(
        columns["image"], np.stack([np.asarray(Image.open(path).convert("RGB")) for path in files])
    )


class TestKeptEncoded:
    """Pictures stored as the bytes of their files."""

    HOW = SourceOptions(keep_encoded=True)

    def test_the_bytes_are_those_of_the_files(self, tmp_path: Path) -> None:
        for i, name in enumerate(("a/0.png", "a/1.jpg", "b/2.jpeg")):
            picture(tmp_path / "raw" / name, (6 + i, 5, 3), i)
        pack_path(tmp_path / "raw", tmp_path / "set", PackOptions(chunk_samples=2), self.HOW)
        packed = open_packed(tmp_path / "set")
        field = packed.fields["image"]
        assert (field.kind, field.dtype, field.encoding) == ("ragged", np.uint8, "image")
        assert packed.fields["label"].encoding is None
        assert packed.classes == ("a", "b")
        with FileSource() as source:
            rows = [read_sample_chunk(packed, source, chunk)["image"] for chunk in (0, 1)]
        found = [bytes(part.row(i)) for part in rows for i in range(len(part))]
        assert found == [
            (tmp_path / "raw" / name).read_bytes() for name in ("a/0.png", "a/1.jpg", "b/2.jpeg")
        ]

    def test_each_is_decoded_once_to_see_that_it_can_be(self, tmp_path: Path) -> None:
        picture(tmp_path / "raw" / "a" / "0.jpg", (40, 40, 3))
        picture(tmp_path / "raw" / "a" / "1.jpg", (40, 40, 3))
        whole = (tmp_path / "raw" / "a" / "1.jpg").read_bytes()
        (tmp_path / "raw" / "a" / "1.jpg").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match=r"a/1.jpg: does not decode as an image"):
            pack_path(tmp_path / "raw", tmp_path / "set", how=self.HOW)
        assert not (tmp_path / "set").exists()

    def test_other_formats_are_refused(self, tmp_path: Path) -> None:
        picture(tmp_path / "raw" / "a" / "0.bmp")
        with pytest.raises(DataError, match=r"0.bmp: is neither JPEG nor PNG, .*leave out --keep-encoded"):
            pack_path(tmp_path / "raw", tmp_path / "set", how=self.HOW)

    def test_they_keep_their_colours(self, tmp_path: Path) -> None:
        picture(tmp_path / "raw" / "a" / "0.png")
        with pytest.raises(UsageError, match=r"--gray .* --keep-encoded .* leave out one"):
            pack_path(tmp_path / "raw", tmp_path / "set", how=SourceOptions(gray=True, keep_encoded=True))

    def test_with_a_size_all_must_have_it(self, tmp_path: Path) -> None:
        picture(tmp_path / "raw" / "a" / "0.png", (8, 8, 3))
        picture(tmp_path / "raw" / "a" / "1.png", (8, 9, 3))
        how = SourceOptions(size=8, keep_encoded=True)
        with pytest.raises(
            DataError, match=r"1.png: 9 x 8 pixels, but --size 8 was given, .* are not scaled"
        ):
            pack_path(tmp_path / "raw", tmp_path / "set", how=how)
        (tmp_path / "raw" / "a" / "1.png").unlink()
        pack_path(tmp_path / "raw", tmp_path / "set", how=how)

    def test_of_a_table_too(self, tmp_path: Path) -> None:
        picture(tmp_path / "raw" / "0.png")
        (tmp_path / "raw" / "t.csv").write_text("file,label\n0.png,4\n")
        source = open_source(tmp_path / "raw" / "t.csv", self.HOW)
        assert source.num_values("image") == (tmp_path / "raw" / "0.png").stat().st_size


class TestDecodeImage:
    """Bytes are decoded to what Pillow makes of them, whatever library does it."""

    @pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
    def test_jpeg(self, options: dict[str, Any]) -> None:
        stream = io.BytesIO()
        pixels = np.random.default_rng(0).integers(0, 256, (33, 41, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(stream, "JPEG", **options)
        wanted = np.asarray(Image.open(stream))
        assert np.array_equal(decode_image(stream.getvalue(), "x"), wanted)
        assert decode_image(stream.getvalue(), "x", (7, 9)).shape == (7, 9, 3)

    @pytest.mark.parametrize("mode", ["L", "CMYK"])
    def test_other_colours(self, mode: str) -> None:
        stream = io.BytesIO()
        Image.new(mode, (8, 4)).save(stream, "JPEG")
        wanted = np.asarray(Image.open(stream).convert("RGB"))
        assert np.array_equal(decode_image(stream.getvalue(), "x"), wanted)

    def test_the_orientation_is_applied(self) -> None:
        exif, stream = Image.Exif(), io.BytesIO()
        exif[0x0112] = 6
        Image.new("RGB", (8, 4)).save(stream, "JPEG", exif=exif)
        assert decode_image(stream.getvalue(), "x").shape == (8, 4, 3)

    def test_too_many_pixels_are_not_decoded(self) -> None:
        """A bomb: the header of a small JPEG says 60000 x 60000."""
        stream = io.BytesIO()
        Image.new("RGB", (16, 16)).save(stream, "JPEG")
        data = stream.getvalue().replace(b"\x08\x00\x10\x00\x10\x03", b"\x08\xea\x60\xea\x60\x03")
        with pytest.raises(DataError, match=r"x: 3600000000 pixels, but the bound is"):
            decode_image(data, "x")

    @pytest.mark.parametrize("cut", [1, 2, 50, 300])
    def test_cut_off_bytes_are_refused(self, cut: int) -> None:
        stream = io.BytesIO()
        pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(stream, "JPEG")
        with pytest.raises(DataError, match="x: does not decode as an image"):
            decode_image(stream.getvalue()[:-cut], "x")
