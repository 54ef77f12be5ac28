"""All settings with their defaults, and another value for each that is allowed."""

from typing import Any

from piecework.training.settings import Settings


def key_of(name: str) -> str:
    """The key of a setting from a keyword: `fedprophet__apa_step` is `fedprophet.apa-step`."""
    return name.replace("__", ".").replace("_", "-")


def settings_with(**values: Any) -> Settings:
    """Settings from keywords."""
    return Settings.from_run_config({key_of(name): value for name, value in values.items()})


def other(value: object) -> object:
    """Another value of the same type that is allowed for every key but those with choices."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value / 2 + 0.125 if isinstance(value, float) else f"{value}x"


CHOICES = {
    "faults.deadline-factor": 2.0,
    "architecture.batch-norm": "local",
    "architecture.norm": "group",
    "training.accelerator": "cuda",
    "training.precision": "bfloat16",
    "training.optimiser-state": "bfloat16",
    "training.optimiser": "adamw",
    "memory.features": "bfloat16",
    "architecture.options": "shortcut_from=relu",
    "data.partition": "iid",
    "data.partition-options": "alpha=0.5",
    "data.input-columns": "pixels",
    "data.pixel-scale": "raw",
    "training.initialisation": "kaiming-normal",
    "training.lr-schedule": "constant",
    "memory.model": "fedepth",
    "fedepth.partial-training": "dilute",
    "fedepth.mutual-loss": "authors",
    "fedepth.sub-problem": "network",
    "fedprophet.feature-norm": "linf",
    "fedprophet.aux-pool": "none",
    "fedprophet.apa-bound": "none",
    "prism.keep-ratios": "0.5",
    "prism.kernel-sampling": "uniform",
    "prism.output-channels": "random",
    "fedprophet.validation-clients": "round",
    "profl.blocks": "budget",
    "profl.cohort": "all",
    "profl.freezing": "parameters",
    "profl.frozen-mode": "training",
    "slt.rounds": "trained",
    "slt.depth": "one",
    "memory.fit": "recompute",
    "fjord.sampling": "round",
    "fjord.norms": "shared",
    "spafl.straight-through": "flowing",
    "fedpm.straight-through": "authors",
    "spafl.importance-update": "off",
    "heterofl.width-ratios": "1,0.5",
    "heterofl.width-rule": "paper",
    "heterofl.left-out": "0.125",
    "fedavg.client-weights": "equal",
    "heterofl.client-weights": "examples",
    "feddf.server-optimiser": "adam",
    "engine": "ray",
    "callbacks": "tracker",
    "run.track": "tensorboard,mlflow",
    "evaluation.mode": "personal",
    "fedrbn.evaluation-branch": "detector",
}


ALL = Settings().to_run_config()
