"""What FeDepth's presets train on each device of the paper's fleets (section 5.1), from their plans."""

import pytest
from helpers import fleet_json

from piecework.commands.options import settings_from
from piecework.device_profiles.fleet import load_fleet
from piecework.models.partition import format_ranges
from piecework.models.work_item import WorkItem
from piecework.plans.plan import planner_for
from piecework.plans.question import ask
from piecework.strategies.cascade.fedepth.mutual import Mutual, Taught
from piecework.strategies.cascade.fedepth.server import FeDepthCut

SIXTH, THIRD, HALF, ONE = "0-1 | 2 | 3 | 4 | 5-6 | 7-9", "0-2 | 3-4 | 5-9", "0-3 | 4-9", "0-9"
EIGHTH = "0,4 | 5 | 6 | 7-8 | 9"  # Lack: the first blocks are left out
PAIR = f"{SIXTH.replace(' |', ' taught |')} taught | 0-9 taught"


def read(item: WorkItem) -> str:
    copies = f"{item.mode.copies} of " if isinstance(item.mode, Mutual) else ""
    return copies + format_ranges(item.atoms) + (" taught" if isinstance(item.mode, Taught) else "")


def planned(preset: str, *sets: str) -> list[str]:
    settings = settings_from(preset, [*sets])
    planner, (states, *_) = planner_for(load_fleet(settings.fleet), settings, ask(settings))
    cut = planner.cut
    assert isinstance(cut, FeDepthCut)
    allowed = {state.device: state.allowed_bytes for state in states}
    return [" | ".join(map(read, cut.items(bytes, cut.needed_bytes))) for bytes in allowed.values()]


@pytest.mark.parametrize("preset", ["fedepth-cifar10-fair", "fedepth-cifar10-authors"])
def test_a_budget_of_one_model_trains_one_model(preset: str) -> None:
    assert planned(preset) == [SIXTH, THIRD, HALF, ONE]
    assert planned(preset, "fleet=fedepth-lack") == [EIGHTH, SIXTH, HALF, ONE]


def test_a_surplus_trains_a_second_model_of_all_blocks() -> None:
    assert planned("fedepth-cifar10-fair", "fleet=fedepth-surplus") == [SIXTH, THIRD, HALF, "2 of 0-9"]
    fleet = f"fleet={fleet_json(seven_sixths=7 / 6, less=1.16, nearly=1.95)}"
    almost = "0-8 taught | 9 taught | 0-9 taught"
    assert planned("fedepth-cifar10-fair", fleet) == [PAIR, ONE, almost]
    by_the_letter = "memory.tolerance=0"  # a sixth of the model, 19.34 MB, is less than block 1's 20.02
    assert planned("fedepth-cifar10-fair", fleet, by_the_letter) == [ONE, ONE, almost]
