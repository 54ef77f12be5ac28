"""Settings of SpaFL and Local."""

from typing import Literal

from piecework.training.settings.table import Count, Fraction, NonNegative, Table, setting


class SpaFLSettings(Table):
    """SpaFL and Local."""

    name = "spafl"

    sparsity: NonNegative = setting(0.002, "alpha, the weight of R = sum exp(-threshold)")
    sparsity_ramp: bool = setting(False, "alpha times 1 / (1 + exp(5 - 10 t)) in round t = 0, 1, ..: the authors' code")
    target_density: Fraction = setting(
        0.0, "alpha falls to 0 while the clients' mean density falls from 0.1 above this to it; 0 = off"
    )
    straight_through: Literal["paper", "flowing", "clipped"] = setting(
        "paper",
        "the gradient through masks; flowing, clipped: the authors' for Fashion-MNIST, for CIFAR",
    )
    importance_update: Literal["paper", "authors", "off"] = setting(
        "paper", "Eq. 13: whether the change of thresholds is divided by the inputs or by the kernel's size"
    )
    frozen_weights: bool = setting(
        False,
        "clients train thresholds alone (Table 1): weights and norms' stay as they began, running statistics move",
    )
    silent_norms: bool = setting(True, "the batch norm of a pruned filter is masked too")
    clamp_thresholds: bool = setting(
        True, "thresholds stay within [0, 1]; false = they may leave it, as in the authors' code"
    )
    client_momentum: bool = setting(False, "clients keep their momentum between rounds")
    masked_every: Count = setting(
        1, "every n-th step uses the masked form, the others drop pruned filters; 0 = none uses it"
    )
