"""Which settings mean something beside which others: those of one system, of one partition, of one schedule.

`ONLY_WITH` is the one place that says so. A key is used where one of its cases holds, a case where each key in it has one of
the values. What is not listed is used by every run. Only values that differ from the default are looked at: Flower hands over
all keys, whoever set them.
"""

from collections.abc import Collection, Iterable, Mapping

from piecework.strategies import STRATEGIES, find_strategy
from piecework.training.settings import Scalar, Settings, SettingsError

Case = Mapping[str, tuple[Scalar, ...]]


def of(*strategies: str, **others: Scalar) -> tuple[Case, ...]:
    """Of these strategies, where the other keys have these values."""
    return ({"strategy": strategies} | {key.replace("_", "-"): (value,) for key, value in others.items()},)


ATTACKED = ({"adversarial": (True,)}, *of("fedprophet", "jfat", "fedrbn"))
MODULES = of("fedprophet", "jfat")
ADJUSTED = of("fedprophet", apa=True)
FEDEPTH = of("fedepth", "m-fedepth")
MOVED = of("profl", freezing="movement")
DISTILLED = of("feddf", "fedet")
LOW_RANK = of("prism", "orthdrop")
SPARSE = of("spafl", "local")

ONLY_WITH: dict[str, tuple[Case, ...]] = {
    "partition-alpha": ({"partition": ("dirichlet",)},),
    "partition-balanced": ({"partition": ("dirichlet",)},),
    "partition-classes": ({"partition": ("pathological", "skewed")},),
    "partition-skew": ({"partition": ("skewed",)},),
    "partition-groups": ({"partition": ("natural",)},),
    "lr-rounds": ({"lr-schedule": ("cosine",)},),
    "lr-decay": ({"lr-schedule": ("exponential",)},),
    "lr-restart": MODULES,
    "evaluation-clients": ({"evaluation": ("personal",)}, *SPARSE),
    "partial-training": FEDEPTH,
    "sub-problem": FEDEPTH,
    "mutual-models": FEDEPTH,
    "mutual-loss": FEDEPTH,
    "attack-step": ATTACKED,
    "attack-steps": ATTACKED,
    "attack-warmup": ATTACKED,
    "evaluation-attack-steps": ATTACKED,
    "clean-weight": of("fedrbn"),
    "evaluation-branch": of("fedrbn"),
    "feature-norm": of("fedprophet"),
    "r-min": of("fedprophet"),
    "convexity": MODULES,
    "stage-rounds": (*MODULES, *MOVED),
    "stage-patience": MODULES,
    "apa": of("fedprophet"),
    "apa-start": of("fedprophet"),
    "apa-step": ADJUSTED,
    "apa-margin": ADJUSTED,
    "apa-every": ADJUSTED,
    "apa-after": MODULES,
    "apa-window": ADJUSTED,
    "apa-least": ADJUSTED,
    "dma": of("fedprophet"),
    "validation-clients": MODULES,
    "blocks": of("profl"),
    "shrinking": of("profl"),
    "distil-rounds": of("profl"),
    "distil-lr": of("profl"),
    "frozen-mode": of("profl"),
    "freezing": of("profl"),
    "movement-window": MOVED,
    "movement-share": MOVED,
    "movement-times": MOVED,
    "movement-scalars": MOVED,
    "distillation-rounds": of("depthfl"),
    "feddyn-alpha": of("depthfl"),
    "width-shares": of("heterofl", "fedrolex", "feddrop", "fjord"),
    "scaler": of("heterofl", "fedrolex", "feddrop"),
    "masked-loss": of("heterofl", "fedrolex"),
    "fjord-sampling": of("fjord"),
    "fjord-distillation": of("fjord", fjord_sampling="batch"),
    "keep-ratios": of("prism", "orthdrop", "origdrop"),
    "kernel-sampling": of("prism"),
    "kappa": of("prism", kernel_sampling="importance"),
    "output-channels": of("prism"),
    "server-momentum": LOW_RANK,
    "mix-share": of("splitmix"),
    "family": DISTILLED,
    "public-data": (*DISTILLED, *of("fedrbn", evaluation_branch="detector")),
    "server-iterations": DISTILLED,
    "server-batch-size": DISTILLED,
    "server-lr": DISTILLED,
    "server-optimiser": DISTILLED,
    "diversity": of("fedet"),
    "sparsity": SPARSE,
    "sparsity-ramp": SPARSE,
    "target-density": SPARSE,
    "straight-through": (*SPARSE, *of("fedpm")),
    "importance-update": SPARSE,
    "silent-norms": SPARSE,
    "client-momentum": SPARSE,
    "masked-every": SPARSE,
}


def unused(settings: Settings) -> list[str]:
    """The keys whose values differ from their defaults and mean nothing in a run with these settings."""
    values = settings.to_run_config()
    return [
        key for key in ONLY_WITH if values[key] != default(key) and not any(holds(c, values) for c in ONLY_WITH[key])
    ]


def require_used(settings: Settings, among: Collection[str] | None = None) -> None:
    """Raises SettingsError, a line for each key that was set and means nothing: what it belongs to, and the remedy.

    Only keys `among` these are looked at; None = all.
    """
    values = settings.to_run_config()
    if lines := [told(key, values) for key in unused(settings) if among is None or key in among]:
        raise SettingsError("\n".join(lines))


def told(key: str, values: Mapping[str, Scalar]) -> str:
    """Why a key means nothing beside these values."""
    cases = ONLY_WITH[key]
    governing = {name for case in cases for name in case if not holds({name: case[name]}, values)}
    have = ", ".join(f"{name} is {values[name]!r}" for name in sorted(governing))
    owners = ", or to ".join(map(written, cases))
    return (
        f"setting {key} = {values[key]!r} has no effect here: it belongs to {owners}, and {have}. "
        f"Leave it out, or set it to its default, {default(key)!r}"
    )


def without_unused(given: Mapping[str, Scalar], preset: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], list[str]]:
    """A preset's values with what was `given` on top, without those that mean nothing because of it; and the keys of these.

    A rival in the place of a preset's system, as with `--set strategy=allsmall`, has no use for that system's settings. Raises
    SettingsError.
    """
    values = dict(preset) | dict(given)
    changed = {key for key, value in given.items() if value != preset.get(key, default(key))}
    dropped = [
        key
        for key in unused(Settings.from_run_config(values))
        if key in preset and key not in given and changed & {name for case in ONLY_WITH[key] for name in case}
    ]
    return {key: value for key, value in values.items() if key not in dropped}, dropped


def holds(case: Case, values: Mapping[str, Scalar]) -> bool:
    """Whether each key of a case has one of its values."""
    return all(
        any(value in allowed for value in (lineage(str(values[key])) if key == "strategy" else [values[key]]))
        for key, allowed in case.items()
    )


def lineage(strategy: str) -> list[str]:
    """The strategy; of one's own also those that it is built on, whose settings it may read."""
    module, _ = STRATEGIES.get(strategy, ("piecework.strategies.", ""))
    if module.startswith("piecework.strategies."):
        return [strategy]
    return [strategy, *(found for base in find_strategy(strategy).__mro__ if (found := base.__dict__.get("name")))]


def written(case: Case) -> str:
    """`strategy = prism with kernel-sampling = importance`."""
    return " with ".join(f"{key} = {listed(allowed)}" for key, allowed in case.items())


def listed(values: Iterable[Scalar]) -> str:
    """`fedepth or m-fedepth`; true and false as TOML has them."""
    *others, last = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return f"{', '.join(others)} or {last}" if others else last


def default(key: str) -> Scalar:
    """The default of a setting, empty where there is no such setting."""
    field = Settings.model_fields.get(key.replace("-", "_"))
    value: Scalar = field.default if field else ""
    return value
