"""The coverage check before the first round: which parts of the model the clients can train."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piecework.models.init_weights import pretrained_units
from piecework.planning.assignment import Planner
from piecework.planning.coverage import Trainer, coverage, coverage_sentence, judge_coverage, part_names
from piecework.planning.cut import Cut
from piecework.strategies.server import MethodServer

LOG = logging.getLogger("piecework")


def check_coverage(server: MethodServer) -> dict[str, Any]:
    """Return the coverage of the model by the connected clients, as JSON values, and log it.

    Raises ValueError if a part of the model would stay random and the settings do not allow that.
    """
    found = describe_coverage(server.method, server.resources.trainers())
    if found["level"] == "error":
        raise ValueError(found["says"])
    say(found)
    return found


def describe_coverage(planner: Planner, trainers: Mapping[int, Trainer]) -> dict[str, Any]:
    """Return the coverage by these clients and what it means, as JSON values. Plans and runs use the same form."""
    rows = coverage(planner, trainers)
    finding = judge_coverage(planner, rows, trainers, pretrained_parts(planner.cut))
    return {"clients": len(trainers), "parts": rows, "level": finding.level, "says": finding.message}


def pretrained_parts(cut: Cut) -> set[str]:
    """Return the parts that start with weights from `training.init-weights`; all parts if that file is not here.

    A plan may be made on a machine that does not have the file.
    """
    names, path = part_names(cut.blueprint), Path(cut.settings.training.init_weights)
    if not cut.settings.training.init_weights:
        return set()
    if not path.is_file():
        return set(names.values())
    return {names[unit] for unit in pretrained_units(path, cut.blueprint)}


def say(found: dict[str, Any]) -> None:
    """Log a coverage: which clients can train which parts, and the finding."""
    LOG.info("%s", coverage_sentence(found["parts"], found["clients"]))
    if found["says"]:
        LOG.log(logging.INFO if found["level"] == "note" else logging.WARNING, "%s", found["says"])
