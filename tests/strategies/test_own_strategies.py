"""Strategies of one's own, MODULE:CLASS: what they take over from what they derive from, and what is said of wrong ones."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from helpers import TRIO, clients_of, fleet_json, run_local
from settings_helpers import settings_with

from piecework.client_app.client import Client, Update
from piecework.client_app.whole import train_whole
from piecework.commands.options import run_command, settings_from
from piecework.commands.settings_list import setting_rows
from piecework.federation.errors import RunAbortedError
from piecework.models.cascade import Blueprint
from piecework.models.change import Change, Origin
from piecework.models.variant import register_change
from piecework.server_app.used_settings import find_unused
from piecework.strategies.low_rank.orthdrop import OrthDrop
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.strategies.width.heterofl.server import HeteroFL
from piecework.training.capabilities import Refusal
from piecework.training.loop import single_loss
from piecework.training.messages import Task
from piecework.training.methods import METHODS, find_entry, load
from piecework.training.settings import Settings, SettingsError
from piecework.training.settings.cases import require_accepted
from piecework.training.settings.table import NonNegative, Table, setting


class OwnSettings(Table):
    """Settings of Own."""

    name = "own"

    mu: NonNegative = setting(0.5, "a number")
    kind: str = setting("", "a text")


class Own(FedAvg):
    """With settings and a trainer of its own."""

    name = "own"
    settings_class = OwnSettings


class Child(Own):
    """Takes over all of it."""

    name = "child"


class Wide(HeteroFL):
    """Measures its batch norms, as HeteroFL does."""

    name = "wide"


class Plain(FedAvg):
    """Changes its steps, so that they cannot be fitted."""

    name = "plain"
    can = replace(FedAvg.can, fit=False, late=False, other_norms=False)


class Mistyped(FedAvg):
    """Refuses a setting that does not exist."""

    name = "mistyped"
    refuses = (Refusal("fedavg.mu", "there is none"),)


class Orthogonal(OrthDrop):
    """OrthDrop's settings are not all of PriSM's."""

    name = "orthogonal"


def train(task: Task, client: Client) -> Update:
    """The client's side of Own and Child."""
    assert client.settings.of(OwnSettings).mu == 0.25
    return train_whole(task, client, single_loss)


def named(cls: type) -> str:
    return f"{__name__}:{cls.__name__}"


def test_a_child_has_its_parents_client_and_settings(tmp_path: Path) -> None:
    entry = find_entry(named(Child))
    assert (entry.client, entry.tables) == (__name__, ("fedavg", named(Own)))
    run = run_local(
        tmp_path, **TRIO | {"strategy": named(Child), "own__mu": 0.25, "num_rounds": 1, "fleet": "unlimited"}
    )
    assert {client["status"] for client in clients_of(run)} == {"ok"}


def test_a_step_of_ones_own_does_not_page_unless_its_class_says_so(tmp_path: Path) -> None:
    """Its clients would refuse every task for memory, and advise another system."""
    assert (find_entry(named(Child)).can.pages, find_entry(named(Plain)).can.pages) == (False, True)
    with pytest.raises(
        ValueError, match=r"memory.fit = 'page': the clients of child do not train the whole model with the"
    ):
        run_local(tmp_path, **TRIO | {"strategy": named(Child), "memory__fit": "page"})


WIDE = """from piecework.strategies.width.heterofl.server import HeteroFL
class Wide(HeteroFL):
    name = "wide"
"""


def test_measured_norms_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are asked for with the strategy of the run, not with the name of the class."""
    (tmp_path / "wide_strategy.py").write_text(WIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = run_local(tmp_path, **TRIO | {"fleet": "unlimited", "strategy": "wide_strategy:Wide", "num_rounds": 1})
    (record,) = run.rounds()
    assert record["accuracy"] is not None


HEAVY = """
from piecework.client_app.whole import train_whole
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.training.loop import single_loss

def make_loss(pieces):
    copies, loss = [p.detach().clone() for p in pieces[0].parameters()], single_loss(pieces)
    return lambda z, y: loss(z, y) + 0 * sum(copy.sum() for copy in copies)

def train(task, client):
    return train_whole(task, client, make_loss)

class Heavy(FedAvg):
    name = "heavy"
"""


def test_a_step_that_costs_more_than_its_cut_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a budget nothing stops it, and with the plan's budgets it would be over them."""
    (tmp_path / "heavy_strategy.py").write_text(HEAVY)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RunAbortedError, match="no client trained in round 1: 3 asked, 3 refused for memory"):
        changes = {"strategy": "heavy_strategy:Heavy", "memory__fit": "auto", "fleet": fleet_json(poor=0.2)}
        run_local(tmp_path / "auto", **TRIO | changes)
    run = run_local(tmp_path, **TRIO | {"fleet": "unlimited", "strategy": "heavy_strategy:Heavy", "num_rounds": 2})
    first = clients_of(run)[0]
    said = f"client 0 took {first['measured_peak']:,} bytes, and {first['predicted_peak']:,} were predicted"
    assert [said in record.message for record in caplog.records if "predicted" in record.message] == [True]


def test_capabilities_take_away_what_the_parent_can() -> None:
    fitted = {"memory__fit": "recompute", "faults__accept_late": 2, "architecture__norm": "group"}
    assert find_unused(settings_with(strategy="fedavg", **fitted)) == []
    assert find_unused(settings_with(strategy=named(Plain), **fitted)) == [
        "architecture.norm",
        "memory.fit",
        "faults.accept-late",
    ]
    assert find_unused(settings_with(strategy=named(Orthogonal), prism__kappa=7.0)) == ["prism.kappa"]
    assert find_unused(settings_with(strategy=named(Orthogonal), prism__server_momentum=True)) == []


def test_its_settings_are_left_out_beside_another_strategy(tmp_path: Path) -> None:
    assignments = [f"strategy={named(Own)}", "own.mu=0.5", "seed=4"]
    assert run_command("", assignments, {"strategy": "fedepth"}) == "piecework run --strategy fedepth --seed 4"
    (tmp_path / "mine.toml").write_text(f'strategy = "{named(Own)}"\n[own]\nmu = 0.5\n')
    assert settings_from(str(tmp_path / "mine.toml"), []).of(OwnSettings).mu == 0.5
    assert settings_from(str(tmp_path / "mine.toml"), ["strategy=fedavg"]).strategy == "fedavg"
    with pytest.raises(SettingsError, match="is a file of your own"):
        settings_from(str(tmp_path / "mine.toml"), ["engine=ray"])
    assert settings_from("", [f"strategy={named(Own)}", "own.kind=5"]).of(OwnSettings).kind == "5"


def test_what_it_takes_over_is_listed() -> None:
    keys = {row["key"] for row in setting_rows(named(Wide))}
    assert {"heterofl.scaler", "heterofl.width-ratios"} <= keys
    assert "own.mu" in {row["key"] for row in setting_rows(named(Own))}


@pytest.mark.parametrize("name", ["training", "run", "heterofl", "", "my_tab"])
def test_names_of_tables_that_others_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnSettings, "name", name)
    monkeypatch.setitem(globals(), "Copy", type("Copy", (Own,), {"name": "copy", "settings_class": OwnSettings}))
    with pytest.raises(SettingsError, match=f"its table of settings is named '{name}'"):
        Settings.from_run_config({"strategy": f"{__name__}:Copy"})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./mine:Own", "expected MODULE:NAME"),
        (".mine:Own", "expected MODULE:NAME"),
        (":Own", "expected MODULE:NAME"),
        ("sys:nothing", "there is no 'nothing' in sys"),
        ("no_such_module:Own", "there is no module 'no_such_module'"),
    ],
)
def test_what_cannot_be_found(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(path)


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_strategy.py").write_text("class Mine(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="'broken_strategy:Mine' cannot be imported: SyntaxError"):
        load("broken_strategy:Mine")


def test_a_change_that_would_not_be_sent() -> None:
    @dataclass(frozen=True)
    class Silent(Change):
        kind: str = "GELU"

        def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
            return model

    with pytest.raises(ValueError, match="give at least one field no default"):
        register_change(Silent)


def test_the_projects_methods_are_their_own_lineage() -> None:
    assert all(find_entry(name) is METHODS[name] for name in METHODS)


def test_a_refusal_of_a_setting_that_does_not_exist() -> None:
    settings = settings_from(None, [f"strategy={named(Mistyped)}"])
    with pytest.raises(ValueError, match=r"refuses the setting 'fedavg\.mu', which does"):
        require_accepted(settings, Mistyped.refuses, Mistyped.name)
