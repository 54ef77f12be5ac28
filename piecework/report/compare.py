"""Runs side by side. Runs that differ only in the seed are one group, with mean, sample standard deviation, extremes.

Means are those of the completed runs, where there are any.

Settings that a resumed run may change (`CHANGEABLE`) do not separate groups, except for the number of rounds: a longer run is
not a repetition of a shorter one.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from string import ascii_uppercase
from typing import Any

from piecework.device_profiles.documents import read_json
from piecework.report import display
from piecework.report.display import UnderAttack
from piecework.report.participation import Participation, participation
from piecework.report.read_records import read_final, read_rounds, read_size, with_details
from piecework.server_app.packages import missing_package
from piecework.server_app.records import CheckpointError, RunDir
from piecework.server_app.run_folder import COMPLETED
from piecework.server_app.summary import best_round, disk_use_of_rounds, peak_over_budget
from piecework.training.settings import CHANGEABLE, Scalar, Settings, SettingsError

IGNORED = CHANGEABLE - {"num-rounds"} | {"seed"}
LONGEST = 32  # characters of a value in a label
UNDER_ATTACK = {"adversarial_accuracy": "PGD", "autoattack_accuracy": "AutoAttack"}  # of the trained model
ACCURACIES = {"accuracy": "Accuracy", "adversarial_accuracy": "Accuracy under attack"}  # of rounds, on the test data


@dataclass(frozen=True)
class RunResult:
    """The figures of one run.

    `reason` says in a line why it did not complete. Bytes are those of training messages; `disk_a_round` has those of paged
    steps, if there are any. `curves` have (round, bytes so far, accuracy) of the evaluated rounds by record key. `under_attack`
    has the trained model's results by `UNDER_ATTACK`, and `best` those of `best_round`. Where nobody trained, all of these are
    empty, and `untrained_accuracy` has what the model gets right as it began. `parameters` are those of the trained model, if
    it was saved: a narrow one may be as accurate as a large one.
    """

    path: Path
    settings: dict[str, Scalar]
    status: str
    reason: str
    rounds: int
    participation: Participation
    accuracy: float | None
    untrained_accuracy: float | None
    best: dict[str, Any] | None
    parameters: int | None
    under_attack: dict[str, UnderAttack]
    totals: dict[str, int]
    enforced: bool
    max_peak_over_budget: float | None
    largest_measured_peak: int
    largest_evaluation_peak: int
    seconds: float
    simulated_seconds: float | None
    disk_a_round: dict[str, float] | None
    curves: dict[str, list[tuple[int, int, float]]]


@dataclass(frozen=True)
class Group:
    """Runs with the same settings; `differs` are the settings that distinguish it (of a single group: the strategy)."""

    label: str
    differs: dict[str, Scalar]
    runs: list[RunResult]

    @property
    def seeds(self) -> list[int]:
        """The seeds in the order of the runs."""
        return [int(run.settings["seed"]) for run in self.runs]

    @property
    def repeated(self) -> dict[int, int]:
        """How many of the counted runs have a seed that several have, by seed: they are repetitions, and no sample of seeds."""
        seeds = Counter(int(run.settings["seed"]) for run in counted_runs(self.runs))
        return {seed: count for seed, count in seeds.items() if count > 1}

    @property
    def alone(self) -> list["Group"]:
        """Each run as a group of its own."""
        return [Group(self.label, self.differs, [run]) for run in self.runs]


def read_run(run_dir: RunDir) -> RunResult:
    """Return the figures of a run. Raises CheckpointError for a folder that is not a run, or one of another version."""
    try:
        settings = Settings.from_run_config(run_dir.settings()).to_run_config()
    except SettingsError as error:
        if missing := missing_package(run_dir.path):
            raise CheckpointError(f"{run_dir.path}: {missing}") from error
        raise CheckpointError(f"{run_dir.path} was written by another version of Piecework: {error}") from error
    with with_details(run_dir):
        return _figures(run_dir, settings)


def _figures(run_dir: RunDir, settings: dict[str, Scalar]) -> RunResult:
    """Return the figures of a run with these settings, from its records."""
    rounds, final = read_rounds(run_dir), read_final(run_dir)
    status, reason, seconds = display.how_it_ended(run_dir, rounds)
    clients, evaluated = participation(rounds), display.accuracies(rounds, final)
    last = evaluated[-1] if evaluated else None
    sent = list(accumulate(r["bytes_down"] + r["bytes_up"] for r in rounds))
    answers = [c for r in rounds for c in r["clients"]]
    trained = clients.trained > 0
    return RunResult(
        path=run_dir.path,
        settings=settings,
        status=status,
        reason=next(iter(reason.splitlines()), ""),
        rounds=len(rounds),
        participation=clients,
        accuracy=last if trained else None,
        untrained_accuracy=None if trained else last,
        best=best_round(rounds, final) if trained else None,
        parameters=read_size(run_dir),
        under_attack=display.under_attack(final) if trained else {},
        totals=display.totals(rounds),
        enforced=display.is_enforced(rounds),
        max_peak_over_budget=peak_over_budget(rounds),
        largest_measured_peak=max((c["measured_peak"] for c in answers), default=0),
        largest_evaluation_peak=max((c.get("evaluation_peak", 0) for c in answers), default=0),
        seconds=seconds,
        simulated_seconds=display.simulated_seconds(rounds),
        disk_a_round=disk_use_of_rounds(rounds),
        curves={
            key: [
                (r["round"], n, r[key]) for r, n in zip(rounds, sent, strict=True) if trained and r.get(key) is not None
            ]
            for key in ACCURACIES
        },
    )


def group_runs(run_dirs: Iterable[RunDir], free: Collection[str] = ()) -> list[Group]:
    """Group the runs by settings, in the given order; the `free` ones do not separate groups either. Raises CheckpointError."""
    ignored = {*IGNORED, *free}
    unique = {run_dir.path: run_dir for run_dir in run_dirs}
    together: dict[str, list[RunResult]] = {}
    for run in map(read_run, unique.values()):
        kept = {key: value for key, value in run.settings.items() if key not in ignored}
        together.setdefault(repr(sorted(kept.items())), []).append(run)
    firsts = [runs[0].settings for runs in together.values()]
    keys = [k for k in next(iter(firsts), {}) if k not in ignored and len({repr(s[k]) for s in firsts}) > 1]
    fleets = fleet_names(str(settings["fleet"]) for settings in firsts)
    groups = []
    for runs in together.values():
        runs.sort(key=lambda run: int(run.settings["seed"]))
        differs = {key: runs[0].settings[key] for key in keys or ["strategy"]}
        if "fleet" in differs:
            differs["fleet"] = fleets[str(differs["fleet"])]
        groups.append(Group(" ".join(f"{key}={short(value)}" for key, value in differs.items()), differs, runs))
    return groups


def fleet_names(fleets: Iterable[str]) -> dict[str, str]:
    """Return the names of fleets, each a name or the JSON of a fleet; with a digest where two of a name differ."""
    names = {fleet: fleet_name(fleet) for fleet in fleets}
    shared = Counter(names.values())
    return {fleet: name if shared[name] == 1 else f"{name}#{digest(fleet)}" for fleet, name in names.items()}


def fleet_name(fleet: str) -> str:
    """Return the name of a fleet, which a run's settings have as JSON; what is no such JSON is returned as it is."""
    try:
        return str(read_json(fleet)["name"])
    except (ValueError, KeyError, TypeError):
        return fleet


def short(value: Scalar) -> str:
    """Shorten a value for a label; a digest tells apart what begins alike."""
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 9]}…#{digest(text)}"


def digest(text: str) -> str:
    """Return seven characters that identify a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:7]


def marks(groups: Sequence[Group]) -> list[str]:
    """Return a mark for each group: A, B, .., Z, AA, BB, .."""
    return [ascii_uppercase[i % 26] * (1 + i // 26) for i in range(len(groups))]


def figures(group: Group) -> dict[str, Any]:
    """Return the figures of a group: means per run unless the name says otherwise, None if no run has the figure.

    Means are those of the `counted` runs.
    """
    runs, counted = group.runs, counted_runs(group.runs)
    best = [(run, run.best["accuracy"]) for run in counted if run.best is not None]
    withstood = {k: [(r, r.under_attack[k].accuracy) for r in counted if k in r.under_attack] for k in UNDER_ATTACK}
    peaks = [run.max_peak_over_budget for run in runs if run.max_peak_over_budget is not None]
    enforced, started = all(run.enforced for run in runs), [run for run in counted if run.rounds]
    return {
        "seeds": group.seeds,
        "status": {status: sum(r.status == status for r in runs) for status in sorted({r.status for r in runs})},
        "counted": len(counted),
        "rounds": [run.rounds for run in runs],
        **mean_and_spread("accuracy", [(run, run.accuracy) for run in counted if run.accuracy is not None]),
        **mean_and_spread("best_accuracy", best),
        "best_rounds": [run.best["round"] for run in runs if run.best is not None],
        "parameters_mean": mean(run.parameters for run in counted if run.parameters is not None),
        **{name: value for key, each in withstood.items() for name, value in mean_and_spread(key, each).items()},
        **{
            f"{key}_mean": mean(r.totals[key] for r in started)
            for key in ("bytes_down", "bytes_up", "bytes_evaluation")
        },
        **disk_figures([run.disk_a_round for run in counted if run.disk_a_round is not None]),
        "seconds_mean": mean(run.seconds for run in started),
        "simulated_seconds_mean": mean(r.simulated_seconds for r in started if r.simulated_seconds is not None),
        "enforced": enforced,
        "max_peak_over_budget": max(peaks, default=None) if enforced else None,
        "largest_measured_peak": max(run.largest_measured_peak for run in runs) or None,
        "largest_evaluation_peak": max(run.largest_evaluation_peak for run in runs) or None,
        **participation_figures([run for run in runs if run.rounds], started),
        "clients_asked": sum(run.totals["asked"] for run in runs),
        "clients_failed": sum(run.totals["failed"] for run in runs),
    }


def counted_runs(runs: list[RunResult]) -> list[RunResult]:
    """Return the runs of which means are taken: those that have completed, or all where none has.

    One that failed or goes on was evaluated after fewer rounds.
    """
    return [run for run in runs if run.status == COMPLETED] or runs


def mean_and_spread(key: str, found: Sequence[tuple[RunResult, float]]) -> dict[str, float | None]:
    """Return the mean of a figure that some runs have, and its spread over their seeds, as KEY_mean and KEY_std."""
    values = [value for _, value in found]
    several = len({run.settings["seed"] for run, _ in found}) > 1
    return {f"{key}_mean": mean(values), f"{key}_std": spread(values, several)}


def participation_figures(started: Sequence[RunResult], counted: Sequence[RunResult]) -> dict[str, Any]:
    """Return who trained in runs that have a round: lists by run, and how many runs have shut a device class out."""
    found = [run.participation for run in started]
    data = [run.participation.data for run in counted if run.participation.data is not None]
    return {
        "clients_trained": [each.trained for each in found],
        "clients_ever_asked": [each.asked for each in found],
        "clients_of_fleet": [each.clients for each in found],
        "data_trained_mean": mean(data),
        "excluded_classes": dict(sorted(Counter(device for each in found for device in each.excluded).items())),
        "untrained_runs": sum(not each.trained for each in found),
    }


def disk_figures(found: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Return mean bytes that paged steps of the runs that have any read and wrote a round, and the most by one client."""
    means = {f"disk_{key}_mean": mean(each[key] for each in found) for key in ("read", "written")}
    most = {f"disk_{key}": max((each[key] for each in found), default=None) for key in ("most_read", "most_written")}
    return means | most


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, or None without values."""
    found = list(values)
    return fmean(found) if found else None


def spread(values: Sequence[float], several: bool) -> float | None:
    """Return the sample standard deviation; None for one value, or if all runs have the same seed."""
    return stdev(values) if len(values) > 1 and several else None


def compare_json(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the groups as JSON values: their figures and their runs."""
    return {
        "groups": [
            {
                "label": group.label,
                "differs": group.differs,
                "repeated_seeds": list(group.repeated),
                **figures(group),
                "runs": [run_json(run, seed) for run, seed in zip(group.runs, group.seeds, strict=True)],
            }
            for group in groups
        ]
    }


def run_json(run: RunResult, seed: int) -> dict[str, Any]:
    """Return a run as JSON values."""
    return {
        "run": run.path.name,
        "path": str(run.path),
        "seed": seed,
        "status": run.status,
        "reason": run.reason,
        "rounds": run.rounds,
        "clients_trained": run.participation.trained,
        "clients_ever_asked": run.participation.asked,
        "clients_of_fleet": run.participation.clients,
        "data_trained": run.participation.data,
        "excluded_classes": run.participation.excluded,
        "accuracy": run.accuracy,
        "untrained_accuracy": run.untrained_accuracy,
        "best_accuracy": run.best["accuracy"] if run.best else None,
        "best_round": run.best["round"] if run.best else None,
        **{key: found.accuracy for key, found in run.under_attack.items()},
    }
