"""All settings with their defaults, and another value for each that is allowed."""

from piecework.training.settings import Settings


def other(value: object) -> object:
    """Another value of the same type that is allowed for every key but those with choices."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value / 2 + 0.125 if isinstance(value, float) else f"{value}x"


CHOICES = {
    "batch-norm": "local",
    "accelerator": "cuda",
    "precision": "bfloat16",
    "model-options": "shortcut_from=relu",
    "partition": "iid",
    "lr-schedule": "constant",
    "memory-model": "fedepth",
    "partial-training": "dilute",
    "mutual-loss": "authors",
    "sub-problem": "network",
    "feature-norm": "linf",
    "keep-ratios": "0.5",
    "kernel-sampling": "uniform",
    "output-channels": "random",
    "validation-clients": "round",
    "blocks": "budget",
    "freezing": "parameters",
    "frozen-mode": "training",
    "fjord-sampling": "round",
    "straight-through": "flowing",
    "importance-update": "off",
    "width-shares": "1,0.5",
    "server-optimiser": "adam",
    "engine": "ray",
    "evaluation": "personal",
    "evaluation-branch": "detector",
}


ALL = Settings().to_run_config()
