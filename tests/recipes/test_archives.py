import gzip
import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from hpctrain.errors import DataError
from hpctrain.recipes.archives import Limits, gunzip, read_tar, read_zip_member

PNG = re.compile(r"package/[a-z]+\.png")


def make_tar(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_a_tar_gives_the_wanted_members_only(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tgz", {"package/a.png": b"A", "package/b.txt": b"B", "other/a.png": b"C"})
    assert read_tar(path, PNG, Limits()) == {"package/a.png": b"A"}


@pytest.mark.parametrize("name", ["../evil.png", "/etc/evil.png", "package/../../evil.png"])
def test_a_name_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    path = make_tar(tmp_path / "a.tgz", {"package/a.png": b"A", name: b"evil"})
    with pytest.raises(DataError, match="points outside"):
        read_tar(path, PNG, Limits())
    assert [found.name for found in tmp_path.iterdir()] == ["a.tgz"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_a_wanted_member_must_be_a_regular_file(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo("package/a.png")
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(DataError, match="not a regular one"):
        read_tar(make_tar(tmp_path / "a.tgz", {"a": member}), PNG, Limits())


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(members=2), "3 members or more, but the bound is 2"),
        (Limits(member_bytes=99), "bytes in package/a.png or more, but the bound is 99"),
        (Limits(total_bytes=250), "300 bytes in all or more, but the bound is 250"),
    ],
)
def test_a_tar_beyond_a_limit_is_refused(tmp_path: Path, limits: Limits, said: str) -> None:
    path = make_tar(tmp_path / "a.tgz", {f"package/{name}.png": bytes(100) for name in "abc"})
    with pytest.raises(DataError, match=said):
        read_tar(path, PNG, limits)
    assert len(read_tar(path, PNG, Limits(members=3, member_bytes=100, total_bytes=300))) == 3


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_a_truncated_tar_is_refused(tmp_path: Path, keep: float) -> None:
    path = make_tar(tmp_path / "a.tgz", {"package/a.png": bytes(range(256)) * 100})
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DataError, match="not a whole tar archive"):
        read_tar(path, PNG, Limits())


def test_a_zip_member_is_read_within_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.bin", bytes(1000))
    assert read_zip_member(path, "data.bin", Limits(member_bytes=1000)) == bytes(1000)
    with pytest.raises(DataError, match="the bound is 999"):
        read_zip_member(path, "data.bin", Limits(member_bytes=999))
    with pytest.raises(DataError, match=r"holds no other\.bin"):
        read_zip_member(path, "other.bin", Limits())


def test_a_damaged_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.bin", b"x" * 1000)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="not a whole zip archive"):
        read_zip_member(path, "data.bin", Limits())


def test_gunzip_stops_at_its_bound() -> None:
    bomb = gzip.compress(bytes(1 << 20))
    assert len(bomb) < 2000
    with pytest.raises(DataError, match="the bound is 65536"):
        gunzip("bomb", bomb, Limits(member_bytes=65536))
    assert gunzip("fine", bomb, Limits(member_bytes=1 << 20)) == bytes(1 << 20)


@pytest.mark.parametrize("data", [b"no gzip", gzip.compress(bytes(1000))[:-4]])
def test_gunzip_refuses_what_is_not_whole(data: bytes) -> None:
    with pytest.raises(DataError, match="not whole gzip data"):
        gunzip("bad", data, Limits())
