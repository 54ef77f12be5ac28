"""The schedule of learning rates: describe it in words, and reject rounds that it would give a rate of 0."""

import shlex
from collections.abc import Iterable, Mapping

from piecework.server_app.used_settings import find_settable
from piecework.training.settings import Settings, SettingsError, learning_rate


def describe(settings: Settings) -> str:
    """Return the schedule with its length in words: `cosine over 20 rounds`."""
    if settings.training.lr_schedule == "constant":
        return "constant"
    restarts = _restarting(settings)
    again = ", again in every stage" if restarts and settings.to_run_config()[restarts] else ""
    if settings.training.lr_schedule == "exponential":
        return f"times {settings.training.lr_decay:g} a round{again}"
    return f"cosine over {settings.training.lr_rounds or settings.num_rounds} rounds{again}"


def low_lr_warning(settings: Settings, rates: Mapping[str, float]) -> str:
    """Return a sentence on the stages whose largest rate is below 1 % of `training.lr`; empty if there are none.

    `rates` has the largest rate of every stage, that of its first round.
    """
    low = {stage: rate for stage, rate in rates.items() if rate < settings.training.lr / 100}
    if not low:
        return ""
    listed = ", ".join(f"{stage} ({rate:.2g})" for stage, rate in low.items())
    restarts = _restarting(settings)
    remedy = f"{restarts} = true, or " if restarts else ""
    longer = "training.lr-rounds" if settings.training.lr_schedule == "cosine" else "training.lr-decay"
    return (
        f"the learning rate never exceeds 1 % of training.lr = {settings.training.lr:g} in {listed}: the schedule "
        f"({describe(settings)}) goes on over all stages. Set {remedy}a larger {longer}"
    )


def _restarting(settings: Settings) -> str:
    """Return the key of the method's setting by which the schedule begins again with every stage; empty if it has none."""
    return next((key for key in find_settable(settings) if key.endswith(".lr-restart")), "")


def require_rates(settings: Settings, to_come: Iterable[tuple[int, int]], run: str) -> None:
    """Raise SettingsError if future rounds would train with a rate of 0, that is, after the last round of a cosine.

    `settings` are those of the schedule, with `training.lr-rounds` set. `to_come` are the future rounds with their places in
    the schedule. `run` is the folder of a resumed run, and empty for a new one.
    """
    if settings.training.lr_schedule != "cosine":
        return
    length, places = settings.training.lr_rounds, list(to_come)
    idle = [server_round for server_round, place in places if place > length]
    if not idle:
        return
    enough = max(place for _, place in places)
    longer = settings.with_values({"training.lr-rounds": enough})
    rate = learning_rate(longer, dict(places)[idle[0]])
    others = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
    advice = f"Set training.lr-rounds = {enough}, which gives round {idle[0]} a rate of {rate:.3g}"
    if run:
        changes = [f"resume-from={run}", f"num-rounds={settings.num_rounds}", f"training.lr-rounds={enough}"]
        command = shlex.join(["piecework", "run", *(part for change in changes for part in ("--set", change))])
        advice += f" ({command}), or leave num-rounds as it was"
    raise SettingsError(
        f"round {idle[0]}{others} would train with a learning rate of 0: num-rounds = {settings.num_rounds}, and the cosine is "
        f"{length} rounds long{', as it was planned when the run began' if run else ' (training.lr-rounds)'}. {advice}"
    )
