"""A small run of SpaFL."""

from helpers import TRIO

SPAFL = TRIO | {
    "strategy": "spafl",
    "fleet": "spafl",
    "training__weight_decay": 0.0,
    "spafl__sparsity": 0.05,
    "training__local_epochs": 2,
}
