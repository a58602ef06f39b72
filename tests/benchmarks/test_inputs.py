from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import inputs
from hpctrain.errors import DataError


def write_archive(path: Path, count: int, side: int = 32) -> None:
    """Pictures whose grey value is their number / 40: JPEG keeps a flat picture to within 1."""
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("test/readme.txt"))
        for number in range(count):
            stream = io.BytesIO()
            Image.new("RGB", (side, side), (number // 40,) * 3).save(stream, "JPEG")
            member = tarfile.TarInfo(f"test/class/{number:04d}.jpg")
            member.size = len(stream.getvalue())
            tar.addfile(member, io.BytesIO(stream.getvalue()))


def test_pictures_are_spread_over_the_archive(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.tar", 10_000)
    found, description = inputs.pictures(300, tmp_path / "a.tar")
    assert found.shape == (300, 32, 32, 3)
    assert found.dtype == np.uint8
    expected = np.arange(300) * 10_000 // 300 // 40
    assert np.abs(found.mean(axis=(1, 2, 3)) - expected).max() <= 1
    assert "300 CIFAR-10 pictures" in description


@pytest.mark.parametrize(
    ("count", "side", "message"), [(50, 32, "45 of 9000 pictures.*fewer than 10000"), (2, 16, "shape")]
)
def test_an_archive_that_does_not_hold_what_is_needed(
    tmp_path: Path, count: int, side: int, message: str
) -> None:
    write_archive(tmp_path / "a.tar", count, side)
    with pytest.raises(DataError, match=message):
        inputs.pictures(9000, tmp_path / "a.tar")


def test_an_archive_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"not a tar file" * 100)
    with pytest.raises(DataError, match="cannot be read"):
        inputs.pictures(2, tmp_path / "a.tar")


def test_without_an_archive_pictures_are_synthetic_and_say_so(tmp_path: Path) -> None:
    found, description = inputs.pictures(20, tmp_path / "missing.tar")
    assert found.shape == (20, 32, 32, 3)
    assert "synthetic" in description
    assert len(np.unique(found)) > 100


@pytest.mark.parametrize("slope", [-1.0, -2.0])
def test_spectrum_has_the_slope_asked_for(slope: float) -> None:
    side = 64
    fields = inputs.random_fields((40,), side, slope, seed=3)
    amplitude = np.sqrt((np.abs(np.fft.rfft2(fields)) ** 2).mean(axis=0))
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    inner = (frequency > 0.03) & (frequency < 0.4)
    fitted = np.polyfit(np.log(frequency[inner]), np.log(amplitude[inner]), 1)[0]
    assert fitted == pytest.approx(slope, abs=0.1)
    assert fields.dtype == np.float32
    assert fields.std(axis=(1, 2)) == pytest.approx(np.ones(40), abs=1e-3)


def test_the_same_seed_gives_the_same_fields() -> None:
    assert np.array_equal(inputs.smooth_fields(3, 16), inputs.smooth_fields(3, 16))
    assert not np.array_equal(inputs.smooth_fields(3, 16), inputs.smooth_fields(3, 16, seed=1))
