"""Settings: what is refused and how the refusal reads, what a resumed run may change, the learning rate."""

import math
import sys
from typing import Any

import pytest
from settings_helpers import ALL, CHOICES, key_of, other

from piecework.device_profiles.profile import allowance, budget_of
from piecework.training.settings import CHANGEABLE, EXTENDABLE, Settings, SettingsError, check_resume, learning_rate


def read(**config: Any) -> Settings:
    return Settings.from_run_config({key_of(key): value for key, value in config.items()})


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("training.lr", "abc", "should be a valid number"),
        ("training.lr", "0.1", "should be a valid number"),
        ("training.lr", 0.0, "should be greater than 0"),
        ("training.lr", -1.5, "should be greater than 0"),
        ("training.lr", math.nan, "should be"),
        ("training.lr", math.inf, "should be a finite number"),
        ("training.weight-decay", math.nan, "should be"),
        ("faults.update-norm-limit", math.inf, "should be a finite number"),
        ("training.lr", True, "should be a valid number"),
        ("num-rounds", 0, "should be greater than or equal to 1"),
        ("num-rounds", 2.0, "should be a valid integer"),
        ("num-rounds", True, "should be a valid integer"),
        ("num-rounds", "3", "should be a valid integer"),
        ("clients", -1, "should be greater than or equal to 0"),
        ("training.batch-size", 1, "should be greater than or equal to 2"),
        ("data.validation-fraction", 1.0, "should be less than 1"),
        ("training.momentum", 1.0, "should be less than 1"),
        ("architecture.width", 4.5, "should be less than or equal to 4"),
        ("architecture.width", 0.0, "should be greater than 0"),
        ("data.augment", 1, "should be a valid boolean"),
        ("data.augment", "true", "should be a valid boolean"),
        ("model", 3, "should be a valid string"),
        ("architecture.batch-norm", "group", "should be 'auto', 'running', 'measured', 'static', 'batch' or 'local'"),
        ("memory.model", "guess", "should be 'traced', 'fedepth', 'fedprophet', 'prism' or 'profl'"),
        ("data.partition", "fair", "should be 'iid', 'dirichlet', 'pathological', 'skewed', 'natural', 'flwr:Cont"),
        ("fedepth.mutual-models", 0, "should be greater than or equal to 1"),
        ("evaluation.target-accuracy", 1.01, "should be less than or equal to 1"),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(key: str, value: object, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config({key: value})  # type: ignore[dict-item]
    assert str(caught.value).startswith(f"setting {key} = {value!r}: {allowed}")


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        read(training__lr=-1, clients="x")
    assert [line.split(" = ")[0] for line in str(caught.value).splitlines()] == [
        "setting clients",
        "setting training.lr",
    ]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("num-round", "unknown setting 'num-round': did you mean 'num-rounds'?"),
        ("num_rounds", "unknown setting 'num_rounds': did you mean 'num-rounds'?"),
        ("apa-step", "unknown setting 'apa-step': did you mean 'fedprophet.apa-step'?"),
        ("attack-steps", "unknown setting 'attack-steps': did you mean 'attack.steps'?"),
        ("messages.messages", "unknown setting 'messages.messages': `piecework settings` lists all "),
        ("x", "unknown setting 'x': `piecework settings` lists all "),
        ("training.learning-rate", "unknown setting 'training.learning-rate': did you mean 'training.lr'?"),
        ("data.alpha", "unknown setting 'data.alpha': did you mean 'data.partition-alpha'?"),
        ("fedprophet.kappa", "unknown setting 'fedprophet.kappa': did you mean 'prism.kappa'?"),
        (
            "batch_sizes",
            "unknown setting 'batch_sizes': did you mean 'training.batch-size' or 'evaluation.batch-size'?",
        ),
    ],
)
def test_unknown_keys(key: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config({key: 1})
    assert str(caught.value).startswith(message)


def test_an_unknown_key_like_no_other() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config({"xyzzy": 1})
    assert str(caught.value) == f"unknown setting 'xyzzy': `piecework settings` lists all {len(ALL)}"


def test_settings_of_earlier_versions() -> None:
    """A run of a version that had more settings can be read and resumed, unless one of them had another value than now."""
    assert Settings.from_run_config({"profl.growing-start": "shrinking", "seed": 3}) == Settings(seed=3)
    with pytest.raises(
        SettingsError, match=r"setting profl.growing-start exists no more: only 'shrinking' is left of it"
    ):
        Settings.from_run_config({"profl.growing-start": "previous"})


def test_an_integer_will_do_for_a_number() -> None:
    settings = read(training__lr=1, training__momentum=0, data__partition_alpha=3)
    assert (settings.training.lr, settings.training.momentum, settings.data.partition_alpha) == (1.0, 0.0, 3.0)
    assert type(settings.training.lr) is float
    assert read(training__lr=1) == read(training__lr=1.0)
    assert read(training__lr=1).hash() == read(training__lr=1.0).hash()


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [("clients", 1, True), ("clients", 1, 1.0), ("data.augment", True, 1), ("training.lr", 1, True)],
)
def test_what_was_right_before_does_not_excuse_what_is_wrong_now(key: str, right: Any, wrong: Any) -> None:
    Settings.from_run_config({key: right})
    with pytest.raises(SettingsError, match=f"setting {key} = {wrong!r}"):
        Settings.from_run_config({key: wrong})


def test_the_run_configuration_round_trips() -> None:
    settings = read(training__lr=0.3, fleet="unlimited", data__augment=True, clients=7)
    config = settings.to_run_config()
    assert config["clients-per-round"] == 10
    assert all("_" not in key for key in config)
    assert Settings.from_run_config(config) == settings
    assert Settings.from_run_config({}) == Settings()


def test_tolerance_is_for_papers_memory_models() -> None:
    with pytest.raises(SettingsError, match=r"memory\.tolerance = 0\.05 exists for a paper's memory\.model only"):
        read(memory__tolerance=0.05)
    assert read(memory__tolerance=0.05, memory__model="fedepth").memory.excess == 0.05
    assert read().memory.excess == 0
    assert read(memory__enforce=False).memory.excess == math.inf
    assert [allowance(1001, excess) for excess in (0, 0.05, math.inf)] == [1001, 1051, sys.maxsize]
    assert [budget_of(bytes, excess) for bytes, excess in ((1001, 0), (1051, 0.05), (2**63, math.inf))] == [
        1001,
        1001,
        0,
    ]


# ---- resumption


@pytest.mark.parametrize("key", ALL)
def test_a_resumed_run_may_change_some_settings_only(key: str) -> None:
    needed = {"memory.tolerance": {"memory.model": "fedepth"}, "privacy": {"privacy.noise-multiplier": 1.0}}
    base = Settings.from_run_config(needed.get(key, needed.get(key.partition(".")[0], {})))  # type: ignore[arg-type]
    changed = Settings.from_run_config(base.to_run_config() | {key: CHOICES.get(key, other(ALL[key]))})  # type: ignore[dict-item]
    assert changed != base
    if key in CHANGEABLE | EXTENDABLE:
        check_resume(base.to_run_config(), changed)
        assert (changed.hash() == base.hash()) == (key in CHANGEABLE)
    else:
        with pytest.raises(
            SettingsError, match=rf"setting {key} = .* differs from .* of the run to resume: a resumed run may"
        ):
            check_resume(base.to_run_config(), changed)
        assert changed.hash() != base.hash()


def test_what_may_change_when_a_run_is_resumed() -> None:
    """Contracts: rounds, output, engine, workers, logging, evaluation cadence, and what does not touch the numbers."""
    for key in ("num-rounds", "output-dir", "engine", "workers", "evaluation.every", "evaluation.on-clients-every"):
        assert key in CHANGEABLE
    for key in (
        "seed",
        "clients",
        "fleet",
        "training.lr",
        "training.lr-rounds",
        "training.batch-size",
        "training.torch-threads",
        "memory.model",
        "strategy",
    ):
        assert key not in CHANGEABLE


def test_the_length_of_the_cosine_may_be_given_but_not_taken_back() -> None:
    check_resume(read(num_rounds=20).to_run_config(), read(num_rounds=40, training__lr_rounds=40))
    check_resume(read(training__lr_rounds=40).to_run_config(), read(training__lr_rounds=60))
    with pytest.raises(
        SettingsError, match=r"training.lr-rounds = 0 differs from 40 .* plain `flwr run` gives each its default"
    ):
        check_resume(read(training__lr_rounds=40).to_run_config(), read())


def test_settings_that_an_older_version_did_not_have() -> None:
    old = {key: value for key, value in ALL.items() if key != "fedepth.mutual-loss"}
    check_resume(old, Settings())


# ---- learning rate


def test_constant_learning_rate() -> None:
    settings = read(training__lr=0.2, training__lr_schedule="constant", num_rounds=5)
    assert [learning_rate(settings, r) for r in (1, 5, 99)] == [0.2, 0.2, 0.2]


def test_cosine_learning_rate() -> None:
    settings = read(training__lr=0.2, training__lr_schedule="cosine", num_rounds=4)
    half, root = 0.1, math.sqrt(0.5)
    expected = [0.2, half * (1 + root), half, half * (1 - root)]
    assert [learning_rate(settings, r) for r in (1, 2, 3, 4)] == pytest.approx(expected)
    assert learning_rate(settings, 5) == pytest.approx(0)
    assert learning_rate(settings, 50) == pytest.approx(0)


def test_the_length_of_the_cosine_can_be_set_apart() -> None:
    settings = read(training__lr=0.2, training__lr_rounds=8, num_rounds=4)
    assert learning_rate(settings, 5) == pytest.approx(0.1)


def test_a_run_name_is_as_long_as_a_folders_name_can_be() -> None:
    assert Settings.from_run_config({"run-name": "a" * 255}).run_name == "a" * 255
    with pytest.raises(SettingsError, match="has 256 bytes; the name of a folder has at most 255"):
        Settings.from_run_config({"run-name": "é" * 128})
