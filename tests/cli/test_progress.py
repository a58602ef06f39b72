"""Progress where there is no terminal; the bar is tested with `hpctrain pack`."""

from __future__ import annotations

import pytest

from hpctrain.cli.progress import amount, lines, progress


def test_a_line_every_few_seconds_and_anew_for_each_activity(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    show = lines(lambda: now_s)
    for second in range(12):
        now_s = float(second)
        show("checking", second, 12, lambda elapsed_s: f"{elapsed_s:.0f} s")
    for second in range(12, 19):
        now_s = float(second)
        show("packing", second, 12, lambda elapsed_s: f"{elapsed_s:.0f} s")
    assert capsys.readouterr().err == "checking: 5 s\nchecking: 10 s\npacking: 5 s\n"


def test_amounts() -> None:
    assert amount(12_000_000, 96_000_000, "MB", 4.0) == "12.0 of 96.0 MB, 3.0 MB/s"
    assert amount(12, 96, "files", 4.0) == "12 of 96 files, 3.0 files/s"
    assert amount(0, 0, "MB", 0.0) == "0.0 of 0.0 MB, 0.0 MB/s"


def test_work_that_is_soon_done_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("copying") as advance:
        advance(1, 2)
        advance(2, 2)
    assert capsys.readouterr().err == ""
