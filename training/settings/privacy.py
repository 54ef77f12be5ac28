"""The settings of client-level differential privacy (federation/privacy.py)."""

from typing import Self

from pydantic import model_validator

from piecework.training.settings.table import Fraction, NonNegative, Positive, Seed, Table, setting

LEAST_NOISE = 1e-3  # one round with less spends more than a million
LARGEST_EPSILON = 1000.0  # more than that promises nothing


class PrivacySettings(Table):
    """What a run promises to each of its clients, and the noise that it takes. Without noise and epsilon: nothing."""

    noise_multiplier: NonNegative = setting(
        0.0,
        "client-level differential privacy: standard deviation of the noise on the sum of a round's updates, in multiples of "
        "privacy.clip; 0 = none, or as much as privacy.epsilon takes",
    )
    epsilon: NonNegative = setting(
        0.0,
        "the run ends before it has spent more than this; without a noise multiplier, the noise is such that num-rounds "
        "spend it; 0 = no limit",
    )
    delta: Fraction = setting(0.0, "delta of the (epsilon, delta) that is spent; 0 = clients^-1.1")
    clip: Positive = setting(
        1.0,
        "maximum Euclidean norm of all that a client changes of the model in a round, its pieces together",
    )
    seed: Seed = setting(
        0,
        "seed of the noise and of who takes part; 0 = a secret of the run. With a known seed nothing is private: for tests",
    )

    @model_validator(mode="after")
    def _noise_hides_something(self) -> Self:
        if 0 < self.noise_multiplier < LEAST_NOISE or self.noise_multiplier > 1 / LEAST_NOISE:
            raise ValueError(
                f"privacy.noise-multiplier = {self.noise_multiplier:g}: give {LEAST_NOISE:g} to {1 / LEAST_NOISE:g}, or 0"
            )
        return self

    @model_validator(mode="after")
    def _epsilon_promises_something(self) -> Self:
        if self.epsilon > LARGEST_EPSILON:
            raise ValueError(
                f"privacy.epsilon = {self.epsilon:g} promises nothing: give at most {LARGEST_EPSILON:g}, or 0 for no limit"
            )
        return self

    @model_validator(mode="after")
    def _nobody_takes_it_for_private(self) -> Self:
        given = {"delta": self.delta, "clip": self.clip - 1.0, "seed": self.seed}
        if not self.on and (alone := [name for name, value in given.items() if value]):
            raise ValueError(
                f"privacy.{alone[0]} = {getattr(self, alone[0]):g} makes nothing private: set privacy.noise-multiplier or "
                "privacy.epsilon too"
            )
        return self

    @property
    def on(self) -> bool:
        """Whether the run is private."""
        return self.noise_multiplier > 0 or self.epsilon > 0
