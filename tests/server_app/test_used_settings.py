"""Settings that mean nothing beside the others: refused with the name of what they belong to, or excluded of a preset."""

import logging
from pathlib import Path
from typing import Any

import pytest
from helpers import TRIO, run_local
from settings_helpers import ALL, CHOICES, key_of, other, settings_with
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.options import read_preset, settings_from
from piecework.commands.presets import preset_rows
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.used_settings import find_unused, require_used
from piecework.strategies.cascade.profl.settings import ProFLSettings
from piecework.strategies.low_rank.prism.server import PriSM
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.training.methods import METHODS
from piecework.training.settings import Settings, SettingsError
from piecework.training.settings.cases import cases

ROOT = Path(__file__).resolve().parents[2]


def changed(key: str, **rest: Any) -> Settings:
    """The demo's settings with another value of this key, and of others."""
    values = {key: CHOICES.get(key, other(ALL[key]))} | {key_of(name): value for name, value in rest.items()}
    return Settings.from_run_config(values)


# ---- one place says what belongs to what


@pytest.mark.parametrize("key", cases())
def test_a_setting_is_used_with_what_it_belongs_to_and_refused_without(key: str) -> None:
    for case in cases()[key]:
        for governing, allowed in case.items():
            assert governing in ALL
            choices = METHODS if governing == "strategy" else None
            for value in allowed:
                assert choices is None or value in choices
                beside = {name: values[0] for name, values in case.items()} | {governing: value}
                assert find_unused(changed(key, **beside)) == []
    methods = {str(method) for case in cases()[key] for method in case.get("strategy", ())}
    stranger = next(name for name in ("fedavg", "fjord", "fedrbn", "fedpm") if name not in methods)
    elsewhere = {"strategy": stranger, "data.partition": "iid", "training.lr-schedule": "constant"}
    elsewhere |= {"architecture.norm": "group"} if key == "architecture.batch-norm" else {}
    with pytest.raises(SettingsError) as caught:
        require_used(changed(key, **elsewhere))
    first, *more = str(caught.value).splitlines()
    assert not more
    assert first.startswith(f"setting {key} = ")
    assert f"Leave it out, or set it to its default, {ALL[key]!r}" in first
    for value in (value for values in cases()[key][0].values() for value in values):
        assert (str(value).lower() if isinstance(value, bool) else str(value)) in first


def test_what_is_wrong_and_what_to_do() -> None:
    with pytest.raises(SettingsError) as caught:
        require_used(Settings.from_run_config({"prism.kappa": 7.0, "training.lr-decay": 0.9}))
    assert str(caught.value).splitlines() == [
        "setting training.lr-decay = 0.9 has no effect here: it belongs to training.lr-schedule = exponential, and "
        "training.lr-schedule is 'cosine'. Leave it out, or set it to its default, 0.994",
        "setting prism.kappa = 7.0 has no effect here: it belongs to strategy = prism with prism.kernel-sampling = "
        "importance, and strategy is 'fedepth'. Leave it out, or set it to its default, 2.5",
    ]


def test_defaults_belong_to_no_method() -> None:
    """Flower hands over all keys."""
    require_used(Settings.from_run_config(Settings(strategy="fedavg").to_run_config()))


def test_strategies_of_ones_own_use_what_those_use_that_they_are_built_on() -> None:
    mine, plain = f"{__name__}:Mine", f"{__name__}:Plain"
    assert find_unused(settings_with(strategy=mine, prism__kappa=7.0)) == []
    assert find_unused(settings_with(strategy=plain, prism__kappa=7.0)) == ["prism.kappa"]


class Mine(PriSM):
    name = "mine"


class Plain(FedAvg):
    name = "plain"


# ---- commands and presets


def test_run_and_plan_refuse_it() -> None:
    for command in ("run", "plan"):
        done = CliRunner().invoke(app, [command, "--set", "strategy=fedepth", "--set", "prism.kappa=7"])
        assert done.exit_code == 2
        assert "setting prism.kappa = 7.0 has no effect here: it belongs to strategy = prism" in " ".join(
            done.stderr.split()
        )


@pytest.mark.parametrize("name", [row["preset"] for row in preset_rows()])
def test_a_run_uses_all_of_a_shipped_preset(name: str) -> None:
    assert find_unused(Settings.from_run_config(read_preset(name))) == []


def test_a_rival_in_a_presets_place_takes_none_of_its_systems_settings(caplog: pytest.LogCaptureFixture) -> None:
    """The documents compare so: `--preset profl-fmnist --set strategy=allsmall`."""
    with caplog.at_level(logging.WARNING):
        settings = settings_from("profl-fmnist", ["strategy=allsmall"])
    assert "--preset profl-fmnist: these have no effect with what was given: profl.stage-rounds, " in caplog.text
    default = Settings()
    assert (settings.strategy, settings.of(ProFLSettings).stage_rounds, settings.of(ProFLSettings).movement_window) == (
        "allsmall",
        0,
        default.of(ProFLSettings).movement_window,
    )
    assert settings.num_rounds == read_preset("profl-fmnist")["num-rounds"]
    assert settings_from("prism-fmnist", ["data.partition=iid"]).data.partition_alpha == default.data.partition_alpha


def test_a_given_setting_of_another_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"setting profl.movement-window = 7 has no effect here: it belongs to strategy = profl"
    ):
        settings_from("profl-fmnist", ["strategy=allsmall", "profl.movement-window=7"])
    (tmp_path / "mine.toml").write_text('strategy = "fedavg"\nprism.kappa = 7.0\n')
    with pytest.raises(SettingsError, match=r"setting prism.kappa = 7\.0 has no effect here"):
        settings_from(str(tmp_path / "mine.toml"), [])


@pytest.mark.slow
def test_a_suggestion_gives_each_system_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("allsmall", "fedavg", "prism", "spafl")
    monkeypatch.setattr("piecework.plans.suggest.METHODS", {name: METHODS[name] for name in some})
    call = ["plan", "--model", "convnet", "--dataset", "digits", "--suggest", "--json"]
    done = CliRunner().invoke(app, [*call, "--strategy", "prism", "--set", "prism.kappa=7"])
    assert done.exit_code == 0, done.stderr


# ---- more clients asked than there are


class Three(LocalGrid):
    """A federation of three nodes, whatever the settings say."""

    def __init__(self, clients: int, *rest: Any) -> None:
        super().__init__(3, *rest)


def test_more_clients_asked_than_there_are() -> None:
    with pytest.raises(SettingsError, match="clients-per-round = 50 is more than the 20 clients there are") as caught:
        settings_from("", ["clients-per-round=50"])
    assert "set it to at most 20, or to 0 to ask all of them" in str(caught.value)
    assert settings_from("", ["clients-per-round=4"], nodes=4).clients_per_round == 4
    assert settings_from("", [], nodes=4).clients_per_round == 10  # no client asked for that


def test_where_the_federation_says_how_many_there_are_a_warning_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = TRIO | {"clients": 0, "clients_per_round": 50, "strategy": "fedavg", "training__local_iterations": 1}
    with caplog.at_level(logging.WARNING):
        run = run_local(tmp_path, Three, **changes)
    assert "clients-per-round = 50 is more than the 3 clients there are" in caplog.text
    (record,) = run.rounds()
    assert record["asked"] == 3
    assert record["warning"].startswith("clients-per-round = 50 is more than the 3 clients there are")
