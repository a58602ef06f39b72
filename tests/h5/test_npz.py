"""`.npz` archives, whole and hostile, and rows of any length in arrays."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.npz import load_npz
from hpctrain.h5.opening import open_source
from hpctrain.h5.pack import SourceOptions, pack_path
from hpctrain.h5.packed import open_packed
from hpctrain.h5.reader import FileSource, Ragged, read_sample_chunk


def arrays() -> dict[str, Any]:
    return {
        "image": np.asfortranarray(np.arange(5 * 4 * 3, dtype=">i2").reshape(5, 4, 3)),
        "wave": np.linspace(0, 1, 5 * 1000).reshape(5, 1000),
        "label": np.arange(5),
    }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_members_are_fields(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "x.npz", **arrays())
    pack_path(tmp_path / "x.npz", tmp_path / "set")
    packed = open_packed(tmp_path / "set")
    with FileSource() as source:
        fields = read_sample_chunk(packed, source, 0)
    assert list(fields) == list(arrays())
    for name, array in arrays().items():
        assert np.array_equal(fields[name], array)


def test_plain_members_are_mapped_and_compressed_ones_unpacked(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays())
    assert all(isinstance(array, np.memmap) for array in load_npz(tmp_path / "x.npz").values())
    np.savez_compressed(tmp_path / "x.npz", **arrays())
    assert not any(isinstance(array, np.memmap) for array in load_npz(tmp_path / "x.npz").values())


@pytest.mark.parametrize("dtype", ["u1", "u2", ">i4", "i8"])
def test_values_and_offsets_are_rows_of_any_length(tmp_path: Path, dtype: str) -> None:
    tokens, offsets = np.arange(10, dtype=dtype), np.array([0, 3, 3, 10])
    np.savez(tmp_path / "x.npz", tokens=tokens, tokens_offsets=offsets, label=np.arange(3))
    pack_path(tmp_path / "x.npz", tmp_path / "set")
    packed = open_packed(tmp_path / "set")
    assert {name: field.kind for name, field in packed.fields.items()} == {
        "tokens": "ragged",
        "label": "dense",
    }
    with FileSource() as source:
        rows = read_sample_chunk(packed, source, 0)["tokens"]
    assert isinstance(rows, Ragged)
    assert rows.values.dtype == np.dtype(dtype).newbyteorder("=")
    assert [rows.row(i).tolist() for i in range(3)] == [[0, 1, 2], [], [3, 4, 5, 6, 7, 8, 9]]


def test_so_are_npy_files_of_a_folder(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(4, dtype=np.uint16))
    np.save(tmp_path / "tokens_offsets.npy", np.array([0, 1, 4], np.uint32))
    source = open_source(tmp_path)
    assert (source.num_samples, source.num_values("tokens")) == (2, 4)


@pytest.mark.parametrize(
    ("tokens", "offsets", "message"),
    [
        (
            np.arange(4),
            np.array([0, 1, 5]),
            r"'tokens': its offsets go from 0 to 5; .* ascend from 0 to the 4 values",
        ),
        (np.arange(4), np.array([1, 4]), "its offsets go from 1 to 4"),
        (np.arange(4), np.array([0, 3, 2, 4]), "they must ascend"),
        (np.arange(4), np.array([0.0, 4.0]), "its offsets .* of float64; a ragged field needs"),
        (np.arange(4), np.zeros(0, int), r"its offsets \(0,\)"),
        (np.zeros((4, 2)), np.array([0, 4]), r"'tokens' has shape \(4, 2\)"),
    ],
)
def test_offsets_that_do_not_fit(tmp_path: Path, tokens: Any, offsets: Any, message: str) -> None:
    np.savez(tmp_path / "x.npz", tokens=tokens, tokens_offsets=offsets)
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / "x.npz")


def test_labels_missing_for_some_samples_name_both(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", image=np.zeros((5, 2)), label=np.zeros(4))
    with pytest.raises(DataError, match="'image' has 5 samples but 'label' has 4"):
        open_source(tmp_path / "x.npz")


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def archive(path: Path, content: bytes, name: str = "x.npy", method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr(name, content)
    return path


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    for content in (npy(np.array([Trap()], dtype=object)), pickle.dumps(Trap())):
        with pytest.raises(
            DataError, match=r"a.npz: .*save it again with numpy.savez, without objects in it"
        ):
            load_npz(archive(tmp_path / "a.npz", content))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_that_says_more_than_the_member_holds(tmp_path: Path, method: int) -> None:
    """A bomb: 2^50 values claimed, none there."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": (2**50,)})
    with pytest.raises(
        DataError, match=r"member 'x.npy' has 128 bytes, but its header says 9007199254741120"
    ):
        load_npz(archive(tmp_path / "a.npz", stream.getvalue(), method=method))


def test_a_member_that_holds_more_than_the_directory_says(tmp_path: Path) -> None:
    """The other bomb: a small size in the directory, a long stream behind it."""
    content = npy(np.zeros(10_000))
    path = archive(tmp_path / "a.npz", content)
    small = npy(np.zeros(10))
    data = path.read_bytes().replace(len(content).to_bytes(4, "little"), len(small).to_bytes(4, "little"))
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"Bad CRC-32 for file 'x\.npy'"):
        load_npz(path)


def test_more_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody has memory to spare for a real one.
    memory = psutil.virtual_memory()._replace(available=100_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(4000), b=np.zeros(4000))
    with pytest.raises(
        DataError, match=r"x.npz: its compressed members take 64256 bytes .* but the bound is 50000"
    ):
        load_npz(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", a=np.zeros(4000), b=np.zeros(4000))
    assert len(load_npz(tmp_path / "x.npz")) == 2


def test_damaged_bytes_fail_their_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.random.default_rng(0).integers(0, 250, 5000, np.uint8))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"x.npz: cannot be read as an archive of arrays"):
        load_npz(path)


@pytest.mark.parametrize("keep", [0, 10, 3000])
def test_truncated_archives(tmp_path: Path, keep: int) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(1000))
    os.truncate(tmp_path / "x.npz", keep)
    with pytest.raises(DataError, match=r"x.npz: cannot be read as an archive of arrays"):
        load_npz(tmp_path / "x.npz")


def with_header(header: str, version: int = 1) -> bytes:
    """A `.npy` file of this header and no values."""
    length = len(header).to_bytes(2 * version, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "header",
    [
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0, {10**30})}}",
        f"{{'descr': '|S0', 'fortran_order': False, 'shape': ({10**30},)}}",
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**40}, {2**40})}}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0, -3)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,2",
        "{1: 2, 'a': 3}",
        "{{}}",
        "\n\n  1\n 2",
        "-" * 9000 + "1",
        "(" * 9000,
    ],
)
def test_headers_that_numpy_does_not_write(tmp_path: Path, header: str, version: int) -> None:
    content = with_header(header, version)
    with pytest.raises(DataError, match=r"a.npz: "):
        load_npz(archive(tmp_path / "a.npz", content))
    with pytest.raises(DataError, match=r"a.npz: "):
        load_npz(archive(tmp_path / "a.npz", content, method=zipfile.ZIP_STORED))
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"a.npy: cannot be read as an array of numbers"):
        open_source(tmp_path / "a.npy")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_any_changed_byte_of_an_archive_is_bad_data_or_harmless(tmp_path: Path, method: int) -> None:
    """Never an error of the filesystem, which would be tried again."""
    path = archive(tmp_path / "a.npz", npy(np.arange(3)), method=method)
    whole = path.read_bytes()
    for position in range(len(whole)):
        for value in (0, 255, whole[position] ^ 128):
            path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            with contextlib.suppress(DataError):
                load_npz(path)


@pytest.mark.parametrize(("name", "method"), [("x.txt", zipfile.ZIP_STORED), ("x.npy", zipfile.ZIP_BZIP2)])
def test_members_that_numpy_does_not_write(tmp_path: Path, name: str, method: int) -> None:
    with pytest.raises(DataError, match=rf"member '{name}' is not an array as NumPy saves it"):
        load_npz(archive(tmp_path / "a.npz", npy(np.zeros(3)), name, method))


def test_names_that_cannot_be_fields(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", id=np.zeros(3))
    with pytest.raises(UsageError, match="'id' cannot name a field"):
        open_source(tmp_path / "x.npz")


def test_options_for_other_sources_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    with pytest.raises(UsageError, match="--field is for HDF5 files"):
        open_source(tmp_path / "x.npz", SourceOptions(fields=("x",)))
    with pytest.raises(UsageError, match="--keep-encoded are for pictures"):
        open_source(tmp_path / "x.npz", SourceOptions(keep_encoded=True))
