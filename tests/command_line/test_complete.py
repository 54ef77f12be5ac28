"""What a shell completes, asked as a shell asks."""

import os
import subprocess
import sys

import pytest

from piecework.commands import complete
from piecework.federated_data.catalogue import DATASETS, OWN
from piecework.models.zoo import MODELS
from piecework.training.methods import METHODS


def asked(*words: str) -> list[str]:
    """The completions of the last word, as bash is told them by the console script's program."""
    code = "from piecework.cli import main; import sys; sys.argv = ['piecework']; main()"
    given = {"COMP_WORDS": " ".join(["piecework", *words]), "COMP_CWORD": str(len(words))}
    environment = {**os.environ, **given, "_PIECEWORK_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_shell_is_told_names() -> None:
    assert asked("run", "--strategy", "fedp") == ["fedpm", "fedprophet", "fedprox"]


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (complete.models, MODELS),
        (complete.strategies, METHODS),
        (complete.datasets, [f"{name}:" if name in OWN else name for name in DATASETS]),
    ],
)
def test_names_are_those_that_there_are(names: complete.Complete, known: list[str]) -> None:
    assert set(known) <= set(names())  # type: ignore[call-arg]


def test_settings_and_what_they_name() -> None:
    assert complete.assignment("fedprox.m") == ["fedprox.mu="]
    assert complete.assignment("strategy=heter") == ["strategy=heterofl"]
    assert complete.assignment("training.lr=0") == []
    assert complete.assignment("fleet=boar") == ["fleet=boards"]
    assert complete.several_strategies("fedavg,heter") == ["fedavg,heterofl"]
    assert "fedavg,fedavg" not in complete.several_strategies("fedavg,fed")
    assert "fedepth-fmnist-fair" in complete.one_of(complete.presets)("fedepth-fmnist")


def test_neither_torch_nor_flower_is_loaded_for_it() -> None:
    code = (
        "import sys; from piecework.cli import app; from piecework.commands import complete as c;"
        "[names() for names in (c.strategies, c.models, c.datasets, c.presets, c.settings)];"
        "print(sorted({'torch', 'flwr'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
