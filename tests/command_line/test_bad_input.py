"""What a user gets wrong is told in one sentence with what was given, whatever it is; exit code 2, no traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from piecework.cli import app
from piecework.client_app.seal import damage
from piecework.commands.options import parse_assignment, settings_from
from piecework.device_profiles.documents import DEEPEST, abbreviate, read_json, read_toml
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.fleet_file import FleetError
from piecework.models.mix import MOST_NETS, Mix
from piecework.models.nested_norms import MOST_RATIOS
from piecework.models.variant import Variant
from piecework.server_app.run_lock import killed_writer
from piecework.training.settings import Settings, SettingsError
from piecework.training.settings import table as settings_table
from piecework.training.settings.run import fields

DEEP = "[" * 100_000
HUGE = "1" + "0" * 400


def test_deep_nesting_is_bad_input_and_no_recursion() -> None:
    """Deeper than Python's stack, and deeper than sensible; keys with dots are tables too."""
    for read, texts in (
        (read_json, (DEEP, '{"a":' * 100_000, "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1))),
        (read_toml, (f"a = {DEEP}", f"a = {'{b=' * 100_000}", ".".join("a" * 3000) + " = 1")),
    ):
        for text in texts:
            with pytest.raises(ValueError, match="nested too deeply: at most 50"):
                read(text)
    assert read_json("[" * DEEPEST + "]" * DEEPEST)
    value: Any = []
    for _ in range(100_000):
        value = [value]
    assert abbreviate(value) == "a list that is too large to show"
    assert abbreviate(10**5000) == "a int that is too large to show"
    assert abbreviate("x" * 1000) == f"'{'x' * 199} .. (1,002 characters)"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--seeds", "1," + "9" * 400], "--seeds '1,999"),
        (["run", "--restarts", "-1"], "'--restarts': -1 is not in the range x>=0"),
        (["certs", "--nodes", str(10**20), "--out", "certs"], f"nodes is {10**20}: it must be 1 to 10000"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_numbers_of_other_commands_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert says in " ".join(done.output.replace("│", "").split())
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_and_a_lock_that_are_nested_too_deeply_are_damaged(tmp_path: Path) -> None:
    for name in ("manifest.json", "lock"):
        (tmp_path / name).write_text('{"a":' * 100_000)
    assert damage(tmp_path) == "manifest.json cannot be read (ValueError)"
    assert killed_writer(tmp_path) is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "training.lr=[0.1]"], "setting training.lr = [0.1]: should be a number"),
        (["--set", "training.lr={a=1}"], "setting training.lr = {'a': 1}: should be a number"),
        (["--set", "seed=[1]"], "setting seed = [1]: should be a whole number"),
        (["--set", "memory.enforce=[]"], "setting memory.enforce = []: should be true or false"),
        (["--set", "nonsense=[1]"], "unknown setting 'nonsense'"),
        (["--set", f"training.lr={DEEP}"], "setting training.lr = '[[[["),
        (["--set", f"training.lr={HUGE}"], "setting training.lr = 1000"),
        (["--set", f"training.lr={HUGE * 20}"], "setting training.lr = '1000"),
        (["--set", f"training.batch-size={2**63}"], f"setting training.batch-size = {2**63}: should be less than"),
        (["--batch-size", str(2**63)], f"setting training.batch-size = {2**63}: should be less than"),
        (["--nodes", str(2**63)], f"setting clients = {2**63}: should be less than"),
        (["--strategy", "splitmix", "--set", "splitmix.width-ratio=1e-5"], "splitmix.width-ratio = 1e-05: should be"),
        (["--strategy", "heterofl", "--set", f"heterofl.width-ratios={','.join(f'0.{n}' for n in range(1, 900))}"],
         "heterofl.width-ratios has 810 fractions: give at most 100"),
        (["--set", f"fleet={{\"a\":{DEEP}"], "fleet JSON: it is nested too deeply"),
        (["--model", "lenet5", "--classes", "10", "--input-shape", f"3x9x{'9' * 5000}"], "--input-shape '3x9x999"),
        (["--model", "lenet5", "--classes", "10", "--input-shape", "3x99999x99999"], "29,999,400,003 values"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_one_sentence_says_what_was_given(words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["plan", *words])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.exception
    assert done.output.startswith("error: ")
    assert says in done.output
    assert len(done.output) < 600


@pytest.mark.parametrize(
    "content", [b"a = " + DEEP.encode(), b"\xff\xfe", b"[training.lr]\nx = 1", b"training.lr = 1e"]
)
def test_a_file_that_is_no_preset_and_no_fleet(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"setting training.lr = \{'x': 1\}" if b"x = 1" in content else str(file)):
        settings_from(str(file), [])
    with pytest.raises(FleetError, match=str(file)):
        load_fleet(str(file))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory", "9" * 400 + "GB"),
        ("memory", 2**63),
        ("flops", 1e308),
        ("flops", 5e-324),
        ("bandwidth", 1e-300),
        ("disk-latency", 1e300),
        ("memory-ratio", 1e300),
        ("cpus", 1e-9),
    ],
)
def test_a_device_beyond_all_measure(key: str, value: Any) -> None:
    device = {"name": "a", "memory": 10**6, "flops": 1e9, "disk-bandwidth": 1e7} | {key: value}
    fleet = json.dumps({"name": "t", "assignment": "round-robin", "device": [device]})
    with pytest.raises(FleetError, match=f"device 1 {key} = "):
        load_fleet(fleet)


def test_the_number_of_nets_and_of_fractions_is_bounded() -> None:
    """Each is built and traced: 10^5 took a minute, or all memory."""
    assert Variant.from_values({"nets": list(range(MOST_NETS))}).find(Mix).nets[-1] == MOST_NETS - 1
    for values in ({"nets": [0] * (MOST_NETS + 1)}, {"nets": [10**400]}, {"nets": [-1]}, {"nested_norms": [0.5] * 101}):
        with pytest.raises(
            ValueError, match=r"at most 100 items|less than 100|greater than or equal to 0|valid integer"
        ):
            Variant.from_values(values)
    assert round(1 / 0.01) == MOST_NETS == MOST_RATIOS == settings_table.MOST_RATIOS


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.sampled_from([2**63, 10**400])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=5
)


@settings(derandomize=True, max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(fields())), VALUES)
def test_any_value_is_a_setting_or_is_refused(key: str, value: Any) -> None:
    try:
        accepted = Settings.from_run_config({key: value}).to_run_config()[key]
    except SettingsError as error:
        assert str(error)
    else:
        assert accepted == value
        assert -(2**63) <= accepted < 2**63 if isinstance(accepted, int) else True


@settings(derandomize=True, max_examples=80, deadline=None, database=None)
@given(st.text(max_size=40) | st.from_regex(r"[\[{\"'0-9eE_.:-]{1,20}", fullmatch=True))
def test_any_text_is_the_value_of_an_assignment(text: str) -> None:
    key, value = parse_assignment(f"training.lr={text}")
    assert key == "training.lr"
    try:
        assert Settings.from_run_config({key: value}).training.lr > 0
    except SettingsError as error:
        assert "training.lr" in str(error)
