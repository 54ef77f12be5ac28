"""`piecework presets`: what there is, and what for."""

import json
from pathlib import Path

from typer.testing import CliRunner

from piecework.cli import app
from piecework.presets import preset_rows

SHIPPED = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "conf").glob("*.toml"))


def test_every_preset_says_what_it_is_for() -> None:
    rows = json.loads(CliRunner().invoke(app, ["presets", "--json"]).stdout)
    assert [row["preset"] for row in rows] == SHIPPED
    assert all(len(row["about"]) > 20 and not row["about"].startswith("#") for row in rows)


def test_a_word_chooses() -> None:
    found = [row["preset"] for row in preset_rows("IMDB")]
    assert found == ["prism-imdb"]
    assert {row["strategy"] for row in preset_rows("spafl")} == {"spafl"}
    shown = CliRunner().invoke(app, ["presets", "m-fedepth"], env={"COLUMNS": "80"}).stdout
    assert shown.splitlines()[0].startswith("m-fedepth-fmnist-fair  m-FeDepth (own heads)")
    assert max(map(len, shown.splitlines())) <= 80


def test_a_word_that_no_preset_has() -> None:
    done = CliRunner().invoke(app, ["presets", "imagenet"])
    assert done.exit_code == 2
    assert f"no preset is about 'imagenet': piecework presets lists all {len(SHIPPED)}" in done.stderr
