"""The documents' pictures are taken from real runs: a terminal's moments, pages that are drawn and whole."""

import re
import shutil
import sys
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("pyte", reason="pyte, of the extra dev, is not installed")
from benchmarks import screenshots, terminal

ANEW = "\r\x1b[2K"  # how rich begins to draw a line again
BLUE = (0, 114, 178)  # of the first group of a comparison


def said(picture: Path) -> list[str]:
    """The lines of a terminal's picture: texts of one height."""
    rows: dict[float, str] = {}
    for y, text in re.findall(r'<text class="[^"]*-r\d+" [^>]*y="([0-9.]+)"[^>]*>([^<]*)</text>', picture.read_text()):
        rows[float(y)] = rows.get(float(y), "") + unescape(text).replace("\xa0", " ")
    return [rows[y].rstrip() for y in sorted(rows)]


def run_of(*moments: str) -> bytes:
    """What a run of four rounds writes: its last line is drawn anew for each moment."""
    drawn = "".join(f"{ANEW}\x1b[32mo\x1b[0m {moment}" for moment in moments)
    return f"round 1/4  ok\r\n{drawn}{ANEW}  4 of 4 rounds\r\n\x1b[1mdone\x1b[0m\r\n".encode()


def test_the_moment_is_in_the_middle_of_a_round(tmp_path: Path) -> None:
    details = "training ends in 2 s  slowest: a"
    written = run_of(
        f"round 2: training 5/10  {details}",
        "round 3: training 4/10",
        f"round 3: training 4/10  {details}",
        f"round 3: training 10/10  {details}",
        f"round 4: training 1/10  {details}",
        "round 4: evaluation 5/10",
    )
    terminal.draw(terminal.in_the_middle("piecework run", written, rounds=4), tmp_path / "now.svg")
    shown = ["$ piecework run", "round 1/4  ok", f"o round 3: training 4/10  {details}"]
    assert said(tmp_path / "now.svg") == shown
    terminal.draw(terminal.at_the_end("piecework run", written), tmp_path / "end.svg")
    shown = ["$ piecework run", "round 1/4  ok", "  4 of 4 rounds", "done"]
    assert said(tmp_path / "end.svg") == shown
    assert "font-weight: bold" in (tmp_path / "end.svg").read_text()
    with pytest.raises(ValueError, match="never showed a moment within a round: b'error"):
        terminal.in_the_middle("piecework run", b"error: no such data set\r\n", rounds=4)


@pytest.mark.slow
def test_a_command_that_fails_says_what_it_wrote() -> None:
    with pytest.raises(SystemExit, match=r"(?s)piecework report nowhere failed:.*nowhere"):
        screenshots.piecework("report", "nowhere")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="chromium and chromedriver are not installed",
)
def test_short_runs_make_all_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("selenium", reason="selenium, of the extra dev, is not installed")
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    monkeypatch.setattr(sys, "argv", ["screenshots", str(tmp_path), "--rounds", "2", "--seeds", "1"])
    screenshots.main()
    names = ["compare.png", "report-telephone.png", "report.png", "terminal-round.svg", "terminal.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(path.stat().st_size < 300_000 for path in tmp_path.iterdir())

    now, end = said(tmp_path / "terminal-round.svg"), said(tmp_path / "terminal.svg")
    assert now[0] == end[0] == "$ piecework run --set run-name=demo --rounds 2"
    assert re.search(r"round \d: training \d+/10", now[-1])
    assert re.search(r"slowest: board-[a-d]", now[-1])
    assert "2 of 2 rounds" in "\n".join(end)
    assert end[-1] == "run folder: runs/demo"

    pictures = {path.stem: image.open(path).convert("RGB") for path in tmp_path.glob("*.png")}
    assert pictures["report"].size == (1000, 1500)
    assert pictures["report-telephone"].size == (390, 1500)
    assert sum(pictures["report-telephone"].getpixel((1, 1))) < 180, "dark"
    study = pictures["compare"]
    assert study.width == 1000
    # the page is whole, and below its last plot ends: that is drawn, and under it is the page's margin alone
    foot = study.crop((0, study.height - 20, 1000, study.height))
    assert foot.getextrema() == ((255, 255),) * 3
    last = study.crop((0, study.height - 420, 1000, study.height - 20))
    assert sum(count for count, colour in last.getcolors(1 << 20) if colour == BLUE) > 50
