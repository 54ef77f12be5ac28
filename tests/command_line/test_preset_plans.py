"""The header of a preset says what its plan does: every command that it names plans, and a paper's preset trains what the paper
says. What is expected is read from the papers (tables and sections named below); what is found comes from `make_plan` and the
strategy's own rate.
"""

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from piecework.app_folder import PRESETS
from piecework.commands.options import settings_from
from piecework.commands.papers import assignments_in, paper_tables, rows_of_preset
from piecework.commands.presets import header, preset_rows
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.memory import StepCost
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.cut import trains_adversarially
from piecework.planning.part import Part
from piecework.plans.plan import make_plan
from piecework.plans.question import PlanQuestion, ask
from piecework.strategies import find_method
from piecework.strategies.cascade.fedprophet.server import FedProphet
from piecework.strategies.cascade.fedprophet.settings import FedProphetSettings
from piecework.strategies.cascade.profl.settings import ProFLSettings
from piecework.training.settings import Scalar, Settings, learning_rate
from piecework.training.setup import blueprint_of_shape

NAMES = [row["preset"] for row in preset_rows()]
UNPLANNED = (  # what changes neither pieces nor who trains them
    *("data.", "evaluation.", "data-dir", "run-name", "num-rounds", "training.init-weights", "attack.warmup"),
    *("fedprophet.apa", "fedprophet.lr-restart", "prism.kappa", "prism.kernel-sampling"),
)
STEP = (
    "strategy",
    "model",
    "dataset",
    "data.image-size",
    "architecture.",
    "training.",
    "attack.",
    "memory.",
    "prism.",
    "fedprophet.",
)
SHAPES = {"npz": ((1, 28, 28), 62), "imdb": ((16,), 2)}  # 16 tokens: a trace of 500 takes long
# Only loaded here: they have the 64 widths of robust-cifar10-heterofl, which is planned, and a plan takes half a minute.
LOADED = (
    *("robust-caltech-feddrop", "robust-caltech-fedrolex", "robust-caltech-heterofl"),
    *("robust-cifar10-feddrop", "robust-cifar10-fedrolex"),
)
EQUAL_RATIOS = ("prism", "orthdrop", "origdrop", "splitmix")  # in PriSM's comparisons all clients take part


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paper's memory model needs no trace: plans trace for seconds and FLOPs, which are not looked at here."""
    traced = CostModel.trace

    def cost(self: CostModel, part: Part) -> StepCost:
        return traced(self, part) if self.memory_model is None else StepCost(0, 0)

    monkeypatch.setattr(CostModel, "trace", cost)


@cache
def planned(values: tuple[tuple[str, Scalar], ...]) -> dict[str, Any]:
    settings = Settings.from_run_config(dict(values))
    known = next((shape for kind, shape in SHAPES.items() if settings.dataset.startswith(kind)), None)
    question = PlanQuestion(*known, examples=250) if known else ask(settings)
    step = tuple((key, value) for key, value in values if key.startswith(STEP))
    costs = cost_model(step, question.input_shape, question.num_classes)
    return make_plan(settings, question, costs)


@cache
def cost_model(step: tuple[tuple[str, Scalar], ...], shape: tuple[int, ...], classes: int) -> CostModel:
    """That of all plans of a system with this model and step, whatever the fleet."""
    settings = Settings.from_run_config(dict(step))
    reference = blueprint_of_shape(settings.with_values({"architecture.width": 1.0}), shape, classes)
    steps = settings.attack.steps if trains_adversarially(find_method(settings.strategy).can, settings) else 0
    return cost_model_for(settings, reference, steps)


def plan_of(settings: Settings) -> dict[str, Any]:
    """The plan of a few clients, unless the fleet lists its clients; of one round, unless the devices change."""
    default, values = Settings().to_run_config(), settings.to_run_config()
    values["clients"] = load_fleet(settings.fleet).prescribed_clients or min(settings.clients, 8)
    values["clients-per-round"] = 0
    values["attack.steps"] = min(1, settings.attack.steps)  # more take no more memory
    own = {key: value for key, value in values.items() if not key.startswith(UNPLANNED) or key == "data.image-size"}
    return planned(tuple((default | own).items()))


def trained(plan: dict[str, Any], stage: int = 0) -> dict[str, float]:
    return {row["what"]: row["fraction"] for row in plan["fleet"]["stages"][stage]["trains"]}


def rates(settings: Settings, stage: int, rounds: int) -> tuple[float, float]:
    """The rates of a stage's first and last round, by the strategy's own method, if every stage has `rounds` rounds."""
    found = []
    for done in (0, rounds - 1):
        number, method = stage * rounds + done + 1, find_method(settings.strategy)
        table, state = settings.of(FedProphetSettings), SimpleNamespace(stage_round=done)
        running: Any = SimpleNamespace(settings=settings, table=table, state=state)
        staged = issubclass(method, FedProphet)
        found.append(method.rate(running, number) if staged else learning_rate(settings, number))
    return found[0], found[1]


def commands_of_rows(name: str) -> list[list[str]]:
    """What a preset is given for the rows that it runs: those that are planned, one of each system and table.

    All of them are loaded, in all columns, so that every setting is known to be read and used.
    """
    rows, found = rows_of_preset(name), {}
    columns = {
        (table.paper, table.name): [[], *map(assignments_in, table.columns.values())] for table in paper_tables()
    }
    for row in rows:
        own = row.assignments()
        for given in columns[row.paper, row.table]:
            strategy = settings_from(name, [*own, *given]).strategy
            found.setdefault((row.table, strategy), own)
    return list(found.values())


# ---- every preset


@pytest.mark.parametrize("name", NAMES)
def test_a_header_says_what_it_runs_and_how_long_that_takes(name: str) -> None:
    top = header(PRESETS / f"{name}.toml")
    assert f" piecework run --preset {name} " in f"{top.text} "
    assert re.fullmatch(
        r"(FedProphet|FeDepth|ProFL|PriSM|SpaFL)'s (Tables? \d+( and \d+)?, row .+|Figure \d+, .+)"
        r"|our own (comparison|example)(, after .+)? \(docs/[\w/-]+\.md\)",
        top.runs,
    )
    assert re.fullmatch(
        r"[\d.]+ (s|min|h|d|years) on 2 cores \((measured|estimated|random data)\)|not measured yet", top.takes
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_a_header_plans_and_somebody_trains_in_each_stage(name: str) -> None:
    for assignments in [[], *header(PRESETS / f"{name}.toml").commands(), *commands_of_rows(name)]:
        settings = settings_from(name, assignments)
        if (
            assignments and settings.dataset == "cifar100"
        ):  # whose variants differ from CIFAR-10's in the classifier alone
            settings = settings.with_values({"dataset": "cifar10"})
        if name in LOADED:
            continue
        shares = [stage["participation"] for stage in plan_of(settings)["fleet"]["stages"]]
        assert min(shares) > (0.99 if settings.strategy in EQUAL_RATIOS else 0), assignments


def test_commands_in_a_header() -> None:
    """Which the test above relies on."""
    found = header(PRESETS / "prism-cifar10.toml").commands()
    assert ["strategy=splitmix", "splitmix.width-ratio=0.2"] in found
    assert ["strategy=orthdrop", "fleet=prism-homogeneous-large"] in found
    assert ["strategy=origdrop"] in found
    assert len(found) == 7


# ---- FedProphet: section 7, Tables 7 and 8, appendix B.4

MEGABYTES = {  # of the modules
    "cifar10": [55.8, 46.1, 50.4, 34.7, 33.1, 59.3, 36.1],
    "caltech": [148.6, 130.2, 130.2, 197.9, 221.6, 206.5, 204.0],
}
LAYERS = {
    "cifar10": ["conv1+conv2", "conv3..conv5", "conv6..conv8", "conv9", "conv10", "conv11+conv12", "conv13"],
    "caltech": ["stem", "block1", "block2", "block3+block4", "block5..block8", "block9..block13", "block14..block16"],
}
RATE = {"cifar10": 0.005, "caltech": 0.001}


@pytest.mark.parametrize("variant", ["", "-authors"])
@pytest.mark.parametrize("data", ["cifar10", "caltech"])
def test_fedprophet_trains_the_papers_modules_at_rates_that_restart(data: str, variant: str) -> None:
    settings = settings_from(f"fedprophet-{data}-balanced{variant}", [])
    modules = plan_of(settings)["modules"]
    assert [row["name"] for row in modules] == LAYERS[data]
    assert [row["memory_bytes"] / 1e6 for row in modules] == pytest.approx(MEGABYTES[data], abs=0.06)
    assert (settings.num_rounds, settings.of(FedProphetSettings).stage_rounds, settings.memory.model) == (
        3500,
        500,
        "fedprophet",
    )
    for stage in range(7):  # a 20th at its end
        assert rates(settings, stage, 500) == pytest.approx((RATE[data], RATE[data] * 0.994**499))
    worded = settings.with_values({"fedprophet.lr-restart": False})
    assert RATE[data] / rates(worded, 2, 500)[0] == pytest.approx(400, rel=0.03)  # as the header says
    own = settings.of(FedProphetSettings)
    assert (own.apa_bound, own.aux_pool, own.validation_clients) == ("start", "authors", "all")
    every = (50, 25, 5) if variant else (1, 0, 1)
    assert (own.apa_every, own.apa_after, own.apa_window) == every
    assert (settings.training.local_iterations, settings.clients_per_round, settings.attack.steps) == (30, 10, 10)


def test_fedprophets_heads_on_all_features_do_not_fit_the_papers_bytes() -> None:
    """Eq. 9 as written: 57.8 instead of Table 7's 55.8 MB in module 1, and more than R_min behind ResNet-34's stem."""
    plan = plan_of(settings_from("fedprophet-cifar10-balanced", ["fedprophet.aux-pool=none"]))
    assert plan["modules"][0]["memory_bytes"] / 1e6 == pytest.approx(57.8, abs=0.06)
    with pytest.raises(ValueError, match="stem"):
        plan_of(settings_from("fedprophet-caltech-balanced", ["fedprophet.aux-pool=none"]))
    assert pytest.approx(617, abs=0.5) == 64 * 56 * 56 * 256 * 12 / 1e6


def test_jfat_trains_the_whole_model_on_every_device() -> None:
    settings = settings_from("jfat-cifar10", [])
    plan = plan_of(settings)
    assert trained(plan) == {"the whole model": 1.0}
    assert plan["full_memory_bytes"] / 1e6 == pytest.approx(302, abs=0.5)  # section 7.2
    assert settings.num_rounds == 500
    assert rates(settings, 0, 500) == pytest.approx((0.005, 0.005 * 0.994**499))


# ---- FeDepth: section 5.1, Tables 1 and 2

SIXTH = "stem+block1 | block2 | block3 | block4 | block5+block6 | block7..block9"
THIRD, HALF, WHOLE = "stem..block2 | block3+block4 | block5..block9", "stem..block3 | block4..block9", "the whole model"


@pytest.mark.parametrize("name", ["fedepth-cifar10-fair", "fedepth-cifar10-authors"])
def test_fedepths_fair_clients_train_the_papers_pieces_and_no_second_model(name: str) -> None:
    settings = settings_from(name, [])
    plan = plan_of(settings)
    assert trained(plan) == {SIXTH: 0.25, THIRD: 0.25, HALF: 0.25, WHOLE: 0.25}
    assert plan["full_memory_bytes"] / plan["batch_size"] == pytest.approx(116.04 * 2**20 / 32, rel=0.01)
    assert (settings.num_rounds, settings.training.local_epochs, settings.training.batch_size) == (500, 10, 128)
    assert rates(settings, 0, 500)[0] == (0.01 if name.endswith("authors") else 0.1)
    assert rates(settings, 0, 500)[1] < 1e-5  # a cosine over all rounds


def test_fedepths_lack_and_surplus_differ_in_the_poorest_and_the_richest() -> None:
    lack = trained(plan_of(settings_from("fedepth-cifar10-fair", ["fleet=fedepth-lack"])))
    surplus = trained(plan_of(settings_from("fedepth-cifar10-fair", ["fleet=fedepth-surplus"])))
    partial = "stem+block4 | block5 | block6 | block7+block8 | block9"  # without blocks 1 to 3
    assert lack == {partial: 0.25, SIXTH: 0.25, HALF: 0.25, WHOLE: 0.25}
    assert surplus == {SIXTH: 0.25, THIRD: 0.25, HALF: 0.25, "2 whole models, mutually": 0.25}


# ---- PriSM: section 4, Tables 1, 2, 3, 10 and 11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keeps", "rounds", "rate"),
    [
        ("prism-cifar10", [0.4], 1000, 0.1),
        ("prism-cifar10-authors", [0.4], 1000, 0.1),
        ("prism-cifar10-heterogeneous", [0.4, 0.2], 1000, 0.1),
        ("prism-deit-cifar10", [0.4], 400, 0.1),
        ("prism-femnist", [0.4], 100, 0.01),
        ("prism-imdb", [0.4], 300, 0.1),
    ],
)
def test_prism_trains_the_papers_sub_models(name: str, keeps: list[float], rounds: int, rate: float) -> None:
    settings = settings_from(name, [])
    plan = plan_of(settings)
    assert set(trained(plan)) == {f"sub-model {keep:g}" for keep in keeps}
    assert (settings.num_rounds, settings.clients_per_round, settings.training.local_epochs) == (rounds, 20, 2)
    assert (settings.training.batch_size, settings.training.weight_decay) == (32, 2e-4)
    assert rates(settings, 0, rounds)[0] == rate
    assert rates(settings, 0, rounds)[1] < rate / 1000
    if plan["memory_model"] == "prism":  # Table 1: 9.5 and 18.9 million values of 31.5
        assert plan["modules"][0]["memory_bytes"] / plan["full_memory_bytes"] == pytest.approx(
            1.5 * keeps[-1], abs=0.01
        )


def test_prisms_devices_have_the_papers_weights() -> None:
    for name in ("prism-heterogeneous", "prism-heterogeneous-large"):
        assert load_fleet(name).weights == (0.4, 0.6)
    rival = settings_from("prism-cifar10-heterogeneous", ["strategy=orthdrop", "fleet=prism-heterogeneous-large"])
    plan = plan_of(rival)
    assert set(trained(plan)) == {"sub-model 0.4", "sub-model 0.2"}
    assert plan["modules"][0]["memory_bytes"] / plan["full_memory_bytes"] > 1  # as the header says


# ---- ProFL: section 3.1, Table 1 (participation: the authors' thresholds)

BLOCKS = {
    "resnet18": ["stem..block2", "block3+block4", "block5+block6", "block7+block8"],
    "resnet34": ["stem..block3", "block4..block7", "block8..block13", "block14..block16"],
    "vgg11": ["conv1..conv4", "conv5..conv8"],
    "vgg16": ["conv1..conv4", "conv5..conv8", "conv9..conv13"],
}


@pytest.mark.slow
def test_fedepths_vit_is_trained_in_the_papers_groups() -> None:
    """Section 5.4: a quarter of the clients each trains groups of 2, 4, 6 and all 12 encoders; 100 rounds at 5e-4."""
    settings = settings_from("fedepth-vit-cifar10", [])
    plan = plan_of(settings)
    assert plan["input_shape"] == [3, 224, 224]
    shares = trained(plan)
    assert [what.split(" | ")[0] for what in shares] == ["embed..encoder2", "embed..encoder4", "embed..encoder6", WHOLE]
    assert set(shares.values()) == {0.25}
    assert (settings.training.lr, settings.num_rounds, settings.training.optimiser) == (5e-4, 100, "adam")


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
@pytest.mark.parametrize("model", BLOCKS)
def test_profl_grows_the_papers_blocks(model: str, data: str) -> None:
    settings = settings_from(f"profl-{model}-{data}", [])
    plan, count = plan_of(settings), len(BLOCKS[model])
    modules = [f"{block} + output module" for block in BLOCKS[model][:-1]] + BLOCKS[model][-1:]
    assert [row["name"] for row in plan["modules"]] == modules
    # Shrinking, with a map of each block, and growing: 500 rounds a step at most, which are ours.
    assert settings.of(ProFLSettings).stage_rounds == 500
    assert settings.num_rounds - 1 == (2 * count - 1) * 500 + (count - 1) * settings.of(ProFLSettings).distil_rounds
    assert set(plan["learning_rates"]["first"].values()) == {0.01}
    assert (settings.training.local_epochs, settings.clients_per_round, settings.clients) == (5, 20, 100)
    if model == "resnet18":
        assert [stage["participation"] for stage in plan["fleet"]["stages"]] == [0.43, 0.81, 0.99, 1.0]


def test_profl_beyond_the_tables() -> None:
    """Section 3.6: three blocks of encoders under AdamW; and about 40 % less memory than all of ResNet18 on FEMNIST."""
    settings = settings_from("profl-vit-tiny-imagenet", [])
    names = [row["name"].removesuffix(" + output module") for row in plan_of(settings)["modules"]]
    assert names == ["embed..encoder4", "encoder5..encoder8", "encoder9..encoder12"]
    assert (settings.training.optimiser, settings.training.lr, settings.num_rounds) == ("adamw", 1e-4, 5 * 500 + 11)
    plan = plan_of(settings_from("profl-resnet18-femnist", []))
    assert plan["input_shape"] == [1, 28, 28]
    assert 1 - plan["modules"][0]["memory_bytes"] / plan["full_memory_bytes"] == pytest.approx(0.4, abs=0.01)


# ---- SpaFL: section 5.1, Table 2, appendix A.1


@pytest.mark.parametrize(
    ("name", "parameters", "rounds", "epochs", "batch", "first", "last"),
    [
        ("spafl-fmnist", 430_500 + 580, 500, 5, 64, 0.001, 0.001),
        ("spafl-cifar10", 804_800 + 1_280 + 650, 500, 5, 16, 0.01, 0.01),  # printed layers, norms, their thresholds
        ("spafl-cifar100", 11_159_232 + 4_800 + 58_212, 1500, 7, 64, 0.01, 0.01 * 0.993**1499),  # and norms, classifier
    ],
)
def test_spafl_trains_the_papers_models(
    name: str, parameters: int, rounds: int, epochs: int, batch: int, first: float, last: float
) -> None:
    settings = settings_from(name, [])
    plan = plan_of(settings)
    assert trained(plan) == {"the whole model, masked": 1.0}
    assert plan["modules"][0]["parameters"] == parameters
    assert (settings.num_rounds, settings.clients, settings.clients_per_round) == (rounds, 100, 10)
    assert (settings.training.local_epochs, settings.training.batch_size) == (epochs, batch)
    assert rates(settings, 0, rounds) == pytest.approx((first, last))
