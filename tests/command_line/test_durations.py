"""What the durations of presets are computed from; the runs themselves are the benchmark's."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.durations import in_words, stage_rounds, write
from piecework.commands.options import settings_from
from piecework.commands.presets import header


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (44.6, "45 s"),
        (60, "1 min"),
        (480, "8 min"),
        (5_300, "88 min"),
        (12_600, "3.5 h"),
        (1e6, "12 d"),
        (3e8, "9.5 years"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("profl-fmnist", [15, 40, 40, 40]),  # shrinking and growing, and a map of 10 of each block but the first
        ("profl-growing-fmnist", [33, 33, 33, 33]),
        ("fedprophet-fmnist", [60, 60, 60, 60]),
        ("robust-fmnist-jfat", [150]),
    ],
)
def test_rounds_of_each_stage(name: str, rounds: list[int]) -> None:
    cut = SimpleNamespace(stages=rounds)
    settings = settings_from(name, [])
    assert stage_rounds(settings, cut) == rounds  # type: ignore[arg-type]
    assert sum(rounds) <= settings.num_rounds  # so that the last stage may take all of its own


def test_a_line_is_written_into_the_header(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text("# Mine\n# piecework run\n# Runs: x\n# Takes: not measured yet\n# More.\nseed = 1\n")
    write(preset, "# Takes: 8 min on 2 cores (measured)")
    assert header(preset).takes == "8 min on 2 cores (measured)"
    assert preset.read_text().endswith("(measured)\n# More.\nseed = 1\n")
