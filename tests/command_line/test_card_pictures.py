"""The pictures of the systems' cards show the program's plan of today."""

import re
from pathlib import Path

import pytest

from benchmarks import card_captions, cards
from benchmarks.card_rows import ALL, Picture, runs_of
from piecework.training.methods import METHODS

SYSTEMS = Path(__file__).resolve().parents[2] / "docs/pictures/systems"
LARGEST = 40_000  # bytes of a picture


def texts(path: Path) -> list[str]:
    """The lines of text in a picture."""
    return re.findall(r"<text[^>]*>([^<]*)", path.read_text("utf-8"))


def test_each_system_has_a_small_picture_and_a_caption() -> None:
    assert {path.stem for path in SYSTEMS.glob("*.svg")} == set(METHODS) == set(card_captions.CAPTIONS)
    assert max(path.stat().st_size for path in SYSTEMS.glob("*.svg")) < LARGEST
    assert set(card_captions.NUMBERS) | set(card_captions.PARTS) <= set(METHODS)


@pytest.mark.parametrize("name", ["heterofl", "fedepth", "cocofl"])
def test_pictures_are_of_todays_plan(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["cards", str(tmp_path), name])
    cards.main()
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.svg"]
    assert texts(tmp_path / f"{name}.svg") == texts(SYSTEMS / f"{name}.svg")


def test_what_rows_say() -> None:
    few, *_, many = Picture("heterofl").boards
    assert {cell.runs for cell in few.rows[0].cells} == {((0.0, 0.125),)}
    assert {cell.runs for cell in many.rows[0].cells} == {ALL}
    assert Picture("fedavg").boards[0].rows[0].note == "refuses: a step takes 100 %"
    by_stage = Picture("profl").boards[-1].rows
    assert [[cell.place for cell in row.cells if cell.kind == "frozen"] for row in by_stage] == [
        [],
        [0, 1],
        [0, 1, 2, 3],
    ]
    assert [[cell.place for cell in row.cells if cell.kind == "extra"] for row in by_stage] == [[2, 4], [4], []]


def test_runs_of_channels() -> None:
    assert runs_of([3, 0, 1], 4) == ((0.0, 0.5), (0.75, 1.0))
    assert runs_of(range(4), 4) == ALL
