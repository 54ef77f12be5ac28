"""The budgets of the claims' fleets are written in bytes: they are fractions of a plain step of the whole model."""

import pytest

from benchmarks.claims.jobs import merged
from benchmarks.claims.reading import FOLDER, read
from piecework.device_profiles.fleet import load_fleet
from piecework.planning.part import whole_model
from piecework.plans.question import PlanQuestion
from piecework.plans.suggest import blueprint_of, cost_model_of
from piecework.training.settings import Settings

SHAPES = {"cifar10-16": (3, 16, 16), "fashion-mnist": (1, 28, 28)}
MIXED = [0.2, 0.35, 0.5, 1]


def step_bytes(claim: str, case: str, row: str) -> int:
    """Return the bytes of a step of the whole model with the settings of a claim's row."""
    found = read(claim)
    settings = Settings.from_run_config(merged(found, found.case(case), found.row(row)))
    question = PlanQuestion(SHAPES[settings.dataset], 10, examples=500)
    costs = cost_model_of(settings, question, settings.attack.steps if settings.training.adversarial else 0)
    return costs.bytes(whole_model(blueprint_of(settings, question)))


@pytest.mark.parametrize(
    ("claim", "case", "row", "fleets"),
    [
        (
            "budgets",
            "activations, mixed",
            "FedAvg, fitted",
            {
                "preresnet20-mixed": MIXED,
                "preresnet20-weak": [0.25],
                "fedepth-fair-true": [1 / 4, 1 / 3, 1 / 2, 1],
                "fedepth-lack-true": [1 / 6, 1 / 4, 1 / 2, 1],
                "fedepth-surplus-true": [1 / 4, 1 / 3, 1 / 2, 2],
            },
        ),
        ("budgets", "parameters, mixed", "FedAvg, fitted", {"resnet34-mixed": MIXED, "resnet34-weak": [0.25]}),
        ("fedprophet", "balanced", "FedAvg-AT, fitted", {"robust-vgg11": [0.44, 0.54, 0.68, 1.05]}),
    ],
)
def test_budgets_are_fractions_of_a_traced_step(claim, case, row, fleets):
    whole = step_bytes(claim, case, row)
    for name, fractions in fleets.items():
        fleet = load_fleet(str(FOLDER / "fleets" / f"{name}.toml"))
        assert [device.memory_bytes for device in fleet.devices] == [round(whole * part) for part in fractions], name
        assert f"{whole:,} bytes" in fleet.description


def test_profls_devices_are_its_list_scaled_by_the_step():
    whole = step_bytes("profl", "few fit, Dirichlet 1", "FedAvg, fitted")
    published = load_fleet("profl").memories
    for name, scale in (("profl-few", 1.0), ("profl-none", 0.65)):
        found = load_fleet(str(FOLDER / "fleets" / f"{name}.toml")).memories
        expected = [memory / 840e6 * whole * scale for memory in published]
        assert found == pytest.approx(expected, rel=0.005)
    assert max(found) < whole
