"""The settings of a run: flat kebab-case keys, all in `[tool.flwr.app.config]`, validated together.

Flower does not check types (`lr=abc` arrives as a string), so run configurations are only read through
`Settings.from_run_config`. An error names the key, the value and what is allowed.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Scalar = bool | int | float | str
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

# Settings that a resumed run may change; all others affect its numbers.
CHANGEABLE = frozenset(
    {
        "num-rounds",
        "output-dir",
        "run-name",
        "resume-from",
        "engine",
        "workers",
        "max-in-flight",
        "evaluate-every",
        "client-evaluation-every",
        "evaluation-clients",
        "autoattack-examples",
        "allow-untrained",  # it decides whether a run starts, but none of its numbers
    }
)
# Settings that a resumed run may set: they affect the rates of the rounds to come.
EXTENDABLE = frozenset({"lr-rounds"})


# Methods whose clients train sub-models, or blocks after others that are random or have just been trained: the statistics kept
# in training are not those of the evaluated model. With FedDF such statistics cost 2 points of accuracy (docs/batch-norm.md).
MEASURED = frozenset(
    {"heterofl", "fedrolex", "feddrop", "fjord", "prism", "orthdrop", "origdrop", "fedpm"}
    | {"fedepth", "m-fedepth", "profl", "feddf"}
)


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class Settings(BaseModel):
    """The settings of one run. Defaults are the demo: FeDepth on the embedded digits over 20 emulated boards."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
    )

    strategy: str = "fedepth"
    num_rounds: AtLeastOne = 20
    clients: Count = Field(
        0, description="number of clients; 0 = as many as the federation has, for `piecework run` 20"
    )
    clients_per_round: Count = Field(
        10,
        description="clients asked per round; 0 = all; at most as many as there are, though the default then means all",
    )
    seed: Count = 1

    model: str = "convnet"
    model_width: Annotated[float, Field(gt=0, le=4)] = 1.0
    batch_norm: Literal["auto", "running", "measured", "batch", "local"] = Field(
        "auto",
        description="statistics of batch norms in evaluation. running: kept in training, averaged with their layer; "
        "measured: training uses those of a batch, clients measure the others after the round; batch: always those of "
        "the batch, on which predictions then depend; local: norms stay with the clients (FedBN); auto = measured where "
        "clients train sub-models or blocks, else running",
    )
    init_weights: str = Field("", description="a .safetensors file to start from, by our names or torchvision's")
    model_options: str = Field("", description="options of the model: stem=cifar,classifier=profl")

    dataset: str = Field("digits", description="a name, npz:FILE, folder:DIR or text:DIR")
    data_dir: str = Field("", description="folder of torchvision's files")
    download: bool = False
    partition: Literal["iid", "dirichlet", "pathological", "skewed", "natural"] = "dirichlet"
    partition_alpha: Positive = 1.0
    partition_balanced: bool = True
    partition_classes: AtLeastOne = Field(2, description="classes per client, pathological and skewed partition")
    partition_skew: Annotated[float, Field(ge=0, le=1)] = Field(
        0.8, description="fraction of a client's examples from its own classes, skewed partition"
    )
    partition_groups: Count = Field(
        0, description="groups (writers) per client, natural partition; 0 = all groups, divided among the clients"
    )
    public_share: Fraction = Field(
        0.0, description="fraction of the training examples set aside for the server's distillation before partitioning"
    )
    public_data: str = Field(
        "", description="the server's public data instead: folder:DIR, npz:FILE, a data set's name"
    )
    validation_share: Fraction = 0.2
    augment: bool = Field(False, description="random flip and crop, drawn once per cache fill")

    local_epochs: AtLeastOne = Field(2, description="passes over the client data, for every sub-problem")
    local_iterations: Count = Field(0, description="batches instead of local-epochs, for every sub-problem; 0 = epochs")
    batch_size: Annotated[int, Field(ge=2)] = 16
    eval_batch_size: Annotated[int, Field(ge=2)] = 256
    lr: Positive = 0.1
    lr_schedule: Literal["constant", "cosine", "exponential"] = "cosine"
    lr_rounds: Count = Field(
        0,
        description="length of the cosine in rounds; 0 = num-rounds of the first start; a resumed run may change it",
    )
    lr_decay: Annotated[float, Field(gt=0, le=1)] = Field(0.994, description="factor per round, exponential")
    lr_restart: bool = Field(False, description="the schedule begins again with every stage")
    momentum: Fraction = 0.9
    weight_decay: NonNegative = 5e-4
    clip_norm: NonNegative = Field(0.0, description="maximum gradient norm of a local step; 0 = off")
    torch_threads: AtLeastOne = Field(1, description="threads of a client's training")
    accelerator: Literal["none", "cuda"] = Field("none", description="cuda: clients train on their GPU")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16: clients' forward passes under autocast, which halves activations"
    )

    fleet: str = Field("demo", description="a shipped fleet, a .toml file, or a fleet as JSON")
    memory_model: Literal["traced", "fedepth", "fedprophet", "prism", "profl"] = "traced"
    tolerance: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="paper memory-models only: allowed excess over the budget, as a fraction"
    )
    enforce_memory: bool = Field(True, description="for tests, false: clients neither refuse nor stop at their budget")
    reserve: Count = Field(64 * 2**20, description="bytes a device with device = 'auto' keeps free")
    feature_cache: bool = Field(True, description="false: features of frozen atoms are computed again every epoch")
    feature_cache_bytes: AtLeastOne = 4 * 10**9

    allow_untrained: bool = Field(
        False, description="run even if no client can train some part of the model, which keeps its initial weights"
    )
    partial_training: Literal["leave-out", "dilute"] = Field(
        "leave-out", description="dilute = the FeDepth authors' choice"
    )
    sub_problem: Literal["blocks", "network"] = Field(
        "blocks",
        description="what a FeDepth client holds: the blocks it trains; network = all blocks, and it trains its own, the first "
        "atom and the head, as its authors fine-tune transformers",
    )
    mutual_models: AtLeastOne = Field(
        2, description="maximum number of models that a FeDepth client distils mutually; 1 = off"
    )
    mutual_loss: Literal["paper", "authors"] = "paper"

    adversarial: bool = Field(
        False, description="train on adversarial examples, if the strategy can; FedProphet and jFAT always do"
    )
    attack_epsilon: Annotated[float, Field(gt=0, le=1)] = Field(
        8 / 255, description="adversarial training: the L-infinity ball around images, pixels in [0, 1]"
    )
    attack_step: Annotated[float, Field(gt=0, le=1)] = Field(2 / 255, description="how far a step moves a pixel")
    attack_steps: AtLeastOne = Field(10, description="PGD steps of adversarial training")
    attack_warmup: Count = Field(0, description="clean rounds before adversarial ones, in every stage")
    clean_weight: Fraction = Field(
        0.0, description="weight of clean examples in FedRBN's adversarial loss; 0.5 = its authors', 0 = FedProphet's"
    )
    evaluation_branch: Literal["oracle", "clean", "adversarial", "detector"] = Field(
        "oracle",
        description="statistics of FedRBN's model in evaluation: oracle = by the kind of example, a fixed set, or by a "
        "detector that learns from public examples",
    )
    feature_norm: Literal["l2", "linf"] = Field("l2", description="the ball around features, FedProphet")
    evaluation_attack_steps: AtLeastOne = Field(20, description="PGD steps of evaluation")
    evaluation_attack_examples: Count = Field(
        1000, description="test images attacked at an evaluation of adversarial training; 0 = none"
    )
    autoattack_examples: Count = Field(0, description="test images under AutoAttack at the end; needs torchattacks")

    r_min: str = Field(
        "",
        description="memory FedProphet cuts for: 60MB, 0.2x of the whole model's attacked step; empty = the fleet's minimum",
    )
    convexity: NonNegative = Field(1e-5, description="FedProphet's mu, the weight of strong convexity")
    stage_rounds: Count = Field(0, description="maximum rounds of a stage; 0 = num-rounds of the first start / stages")
    stage_patience: Count = Field(50, description="a stage ends after this many rounds without a better score; 0 = off")
    apa: bool = Field(True, description="FedProphet's Adaptive Perturbation Adjustment")
    apa_start: NonNegative = Field(0.3, description="alpha at the beginning of a stage")
    apa_step: NonNegative = Field(0.1, description="step by which alpha changes")
    apa_margin: Fraction = Field(0.05, description="gamma: margin of the accuracies' ratio")
    apa_every: AtLeastOne = Field(1, description="rounds between adjustments of alpha")
    apa_after: Count = Field(
        0, description="rounds of a stage before its first score and adjustment, besides the warm-up"
    )
    apa_window: AtLeastOne = Field(1, description="rounds over which the ratio is averaged")
    apa_least: NonNegative = Field(0.0, description="alpha's lower bound")
    dma: bool = Field(True, description="FedProphet's Differentiated Module Assignment")
    validation_clients: Literal["all", "round"] = Field(
        "all", description="who validates the new model of adversarial training: all clients, or those of the round"
    )

    blocks: Literal["architecture", "budget"] = Field(
        "architecture",
        description="source of ProFL's blocks; budget = as large as the client with the least memory can train",
    )
    shrinking: bool = Field(True, description="ProFL's progressive shrinking, before it grows the model")
    distil_rounds: Count = Field(5, description="rounds of integrating a block into its basic layer, ProFL; 0 = none")
    distil_lr: Positive = Field(1e-5, description="their rate")
    frozen_mode: Literal["evaluation", "training"] = Field(
        "evaluation", description="how ProFL's frozen blocks run; training = the authors' choice"
    )
    freezing: Literal["movement", "parameters"] = Field(
        "movement", description="when ProFL ends a step; parameters = after rounds in proportion to its block's"
    )
    movement_window: Annotated[int, Field(ge=2)] = Field(
        10, description="H: rounds of an effective movement, and of a slope"
    )
    movement_share: Fraction = Field(0.1, description="phi, a fraction of the block's initial slope")
    movement_times: AtLeastOne = Field(20, description="W: rounds in a row below phi that freeze a block")
    movement_scalars: Count = Field(
        1_000_000,
        description="parameters per block whose movement is measured; 0 = all; checkpoints hold H + 1 values of each",
    )

    distillation_rounds: AtLeastOne = Field(300, description="rounds in which DepthFL's self-distillation gains weight")
    feddyn_alpha: NonNegative = Field(0.0, description="DepthFL: FedDyn's regularisation; 0 = federated averaging")

    width_shares: str = Field(
        "1,0.5,0.25,0.125,0.0625",
        description="allowed width ratios of sub-models: HeteroFL, FedRolex, FedDrop",
    )
    scaler: bool = Field(True, description="divide the layer outputs of these sub-models by the width ratio")
    masked_loss: bool = Field(True, description="set logits of classes missing on a client to 0, HeteroFL and FedRolex")

    fjord_sampling: Literal["batch", "round"] = Field(
        "batch",
        description="when FjORD draws a width ratio; round = once per client, as in SpaFL's comparison",
    )
    fjord_distillation: bool = Field(False, description="a FjORD client's widest net teaches those within it")

    keep_ratios: str = Field("0.8,0.6,0.4,0.2", description="allowed keep ratios of PriSM's sub-models")
    kernel_sampling: Literal["importance", "uniform", "softmax"] = Field(
        "importance", description="how PriSM draws kernels: by a power of their singular values, or its Table 5's"
    )
    kappa: NonNegative = Field(2.5, description="that power")
    output_channels: Literal["first", "random", "all"] = Field(
        "first",
        description="which output channels PriSM's sub-models compute; random = its authors' code, all = their first",
    )
    server_momentum: bool = Field(
        False, description="the server averages the momentum of PriSM's factors and norms, as its authors' code does"
    )

    mix_share: Annotated[float, Field(gt=0, le=1)] = Field(0.125, description="width ratio of a base net, SplitMix")

    family: str = Field(
        "",
        description="other models that clients may have, largest first: vgg13,vgg11,cnn3; FedDF and FedET; empty = "
        "FedProphet's for vgg16 and resnet34",
    )
    server_iterations: AtLeastOne = Field(
        128, description="batches of public examples a round of distillation, and model"
    )
    server_batch_size: Annotated[int, Field(ge=2)] = Field(64, description="their size")
    server_lr: Positive = Field(0.005, description="their rate")
    server_optimiser: Literal["sgd", "adam"] = Field(
        "sgd", description="sgd: with momentum 0.9, as FedProphet's authors; adam: FedDF's own"
    )
    diversity: NonNegative = Field(0.05, description="FedET's lambda, the weight of clients that disagree")

    sparsity: NonNegative = Field(0.002, description="SpaFL's alpha, the weight of R = sum exp(-threshold)")
    sparsity_ramp: bool = Field(
        False, description="alpha times 1 / (1 + exp(5 - 10 t)) in round t = 0, 1, ..: its authors' code"
    )
    target_density: Fraction = Field(
        0.0, description="alpha falls to 0 while the clients' mean density falls from 0.1 above this to it; 0 = off"
    )
    straight_through: Literal["paper", "flowing", "clipped"] = Field(
        "paper", description="SpaFL's gradient through masks; flowing, clipped: its authors' for FMNIST, for CIFAR"
    )
    importance_update: Literal["paper", "authors", "off"] = Field(
        "paper",
        description="Eq. 13: whether the change of thresholds is divided by the inputs or by the kernel's size",
    )
    silent_norms: bool = Field(True, description="the batch norm of a pruned filter is masked too")
    client_momentum: bool = Field(False, description="SpaFL's clients keep their momentum between rounds")
    masked_every: Count = Field(
        1,
        description="every n-th step of SpaFL uses the masked form, the others drop pruned filters; 0 = none",
    )

    evaluate_every: Count = Field(1, description="rounds between evaluations; 0 = only at the end")
    evaluation: Literal["auto", "central", "personal"] = Field(
        "auto",
        description="central: the server evaluates the model; personal: clients on their parts of the test split, mean over "
        "them; auto = central if there is one model",
    )
    evaluation_clients: Count = Field(0, description="clients drawn for a personal evaluation; 0 = all")
    client_evaluation_every: Count = Field(0, description="rounds between evaluations on the clients; 0 = never")
    target_accuracy: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="stop early when reached; 0 = off")
    patience: Count = Field(0, description="stop after this many evaluations without a better accuracy; 0 = off")
    max_empty_rounds: AtLeastOne = Field(
        1, description="rounds in a row in which no client trained before the run aborts"
    )
    update_norm_limit: NonNegative = Field(
        10.0,
        description="limit on a unit's update, in multiples of the median accepted norm, at first the model's; 0 = off",
    )
    min_clients: Count = Field(
        0,
        description="minimum that must connect at the start and train in a round; 0 = all at the start, one in a round",
    )
    round_timeout: Positive = Field(3600.0, description="seconds a round waits for replies")
    node_timeout: Positive = Field(120.0, description="seconds to wait for the clients to connect")

    engine: Literal["local", "ray", "deployment"] = "local"
    workers: Count = Field(0, description="client processes at once; 0 = one per core")
    message_bytes: AtLeastOne = Field(2**25, description="maximum bytes of frozen atoms in a message")
    max_in_flight: Count = Field(
        0, description="messages out at once; 0 = twice the workers, at least 4; deployment: all"
    )
    output_dir: str = "runs"
    run_name: str = Field("", description="folder of the run in output-dir; empty = strategy, data set, seed and time")
    state_dir: str = Field("", description="the clients' stores; empty = RUN/clients")
    resume_from: str = Field(
        "", description="a run's folder, or auto = the newest run in output-dir with these settings"
    )

    @model_validator(mode="after")
    def _tolerance_is_for_papers(self) -> Self:
        if self.tolerance and self.memory_model == "traced":
            raise ValueError(
                "tolerance exists for a paper's memory-model only: traced budgets are enforced as they are"
            )
        return self

    @model_validator(mode="after")
    def _papers_count_in_float32(self) -> Self:
        if self.precision != "float32" and self.memory_model != "traced":
            raise ValueError(
                f"precision = {self.precision!r}: memory-model {self.memory_model} knows float32 only, use traced"
            )
        return self

    @model_validator(mode="after")
    def _enough_are_asked(self) -> Self:
        for key, asked in (("clients", self.clients), ("clients-per-round", self.clients_per_round)):
            if 0 < asked < self.min_clients:
                raise ValueError(f"min-clients = {self.min_clients} is more than {key} = {asked}")
        return self

    @model_validator(mode="after")
    def _no_more_are_asked_than_there_are(self) -> Self:
        if self.clients and (told := too_many_asked(self, self.clients)):
            raise ValueError(told)
        return self

    @model_validator(mode="after")
    def _alpha_starts_above_its_bound(self) -> Self:
        if self.apa_least > self.apa_start:
            raise ValueError(f"apa-least = {self.apa_least} is more than apa-start = {self.apa_start}")
        return self

    @model_validator(mode="after")
    def _clients_evaluate_one_thing(self) -> Self:
        if self.evaluation == "personal" and self.client_evaluation_every:
            raise ValueError(
                f"client-evaluation-every = {self.client_evaluation_every}: with evaluation = 'personal' clients evaluate on "
                "their parts of the test split, by evaluate-every; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _options_are_pairs(self) -> Self:
        self.options()
        return self

    @model_validator(mode="after")
    def _ratios_are_in_range(self) -> Self:
        self.width_ratios()
        self.keeps()
        return self

    def width_ratios(self) -> list[float]:
        """Return the values of `width-shares`, largest first. Raises ValueError."""
        return _ratios("width-shares", self.width_shares)

    def keeps(self) -> list[float]:
        """Return the values of `keep-ratios`, largest first. Raises ValueError."""
        return _ratios("keep-ratios", self.keep_ratios)

    def options(self) -> dict[str, str]:
        """Return `model-options` as a dictionary. Raises ValueError."""
        pairs = [pair.partition("=") for pair in self.model_options.split(",") if pair.strip()]
        if bad := [name for name, equals, value in pairs if not (name.strip() and equals and value.strip())]:
            raise ValueError(f"model-options = {self.model_options!r}: {bad[0]!r} is not NAME=VALUE")
        return {name.strip(): value.strip() for name, _, value in pairs}

    def evaluation_due(self, server_round: int) -> bool:
        """Return whether a round ends with an evaluation: every `evaluate-every`-th round does, and the last one."""
        return server_round == self.num_rounds or bool(self.evaluate_every and server_round % self.evaluate_every == 0)

    @property
    def norms(self) -> str:
        """The value of `batch-norm`; `auto` is resolved for the strategy."""
        if self.batch_norm != "auto":
            return self.batch_norm
        return "measured" if self.strategy in MEASURED else "running"

    @property
    def batch_statistics(self) -> bool:
        """Whether clients always run batch norms with the statistics of the batch."""
        return self.norms in ("batch", "measured")

    @property
    def enforced(self) -> bool:
        """Whether budgets are enforced on clients: only for traced bytes, and if the checks are on."""
        return self.memory_model == "traced" and self.enforce_memory

    def allowance(self, budget: int) -> int:
        """Return the bytes that a cut may use: the budget plus the fraction `tolerance` of it.

        They are unlimited if the checks are off.
        """
        return int(budget * (1 + self.tolerance)) if self.enforce_memory else sys.maxsize

    @classmethod
    def from_run_config(cls, config: Mapping[str, Scalar]) -> Self:
        """Validate a flat run configuration. Raises SettingsError."""
        # with their types, because a cache treats True, 1 and 1.0 as equal
        items = tuple((key, type(config[key]), config[key]) for key in sorted(config))
        return _validated(cls, items)  # type: ignore[return-value]

    def to_run_config(self) -> dict[str, Scalar]:
        """Return the flat kebab-case form with every key."""
        return self.model_dump(by_alias=True)

    def hash(self) -> str:
        """Return a short digest of the settings that affect a run's numbers; equal for a run and its resumption."""
        kept = {key: value for key, value in self.to_run_config().items() if key not in CHANGEABLE}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def _validated(cls: type[Settings], items: tuple[tuple[str, type, Scalar], ...]) -> Settings:
    values = {key: value for key, _, value in items}
    for key, value in values.items():
        field = cls.model_fields.get(key.replace("-", "_"))
        if field is None or "_" in key:
            raise SettingsError(_unknown_key(cls, key))
        if isinstance(value, int) and not isinstance(value, bool) and isinstance(field.default, float):
            values[key] = float(value)
    try:
        return cls.model_validate(values, by_alias=True, by_name=False)
    except ValidationError as error:
        raise SettingsError("\n".join(map(_explain, error.errors()))) from None


def _unknown_key(cls: type[Settings], key: str) -> str:
    from difflib import get_close_matches

    known = sorted(name.replace("_", "-") for name in cls.model_fields)
    near = get_close_matches(key.replace("_", "-"), known, n=1)
    return f"unknown setting {key!r}" + (f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}")


def _explain(error: Mapping[str, object]) -> str:
    location = error["loc"]
    if not isinstance(location, tuple) or not location:
        return str(error["msg"]).removeprefix("Value error, ")
    key = location[0]
    message = str(error["msg"]).removeprefix("Input ")
    return f"setting {key} = {error['input']!r}: {message}"


def check_resume(old: Mapping[str, Scalar], new: Settings) -> None:
    """Raise SettingsError, which names the first key, unless `new` may resume a run with the settings `old`."""
    for key, value in new.to_run_config().items():
        may_change = key in CHANGEABLE or (key in EXTENDABLE and value)
        if not may_change and key in old and old[key] != value:
            raise SettingsError(
                f"setting {key} = {value!r} differs from {old[key]!r} of the run to resume: a resumed run may only change "
                f"{', '.join(sorted(CHANGEABLE | EXTENDABLE))}. `piecework run --set resume-from=DIR` takes all others from "
                "the run; plain `flwr run` gives each its default unless it is named"
            )


def _ratios(key: str, text: str) -> list[float]:
    try:
        found = sorted({float(ratio) for ratio in text.split(",")}, reverse=True)
    except ValueError:
        found = []
    if not found or not 0 < found[-1] <= found[0] <= 1:
        raise ValueError(f"{key} = {text!r}: give fractions above 0 and up to 1, as in 1,0.5,0.25")
    return found


def too_many_asked(settings: Settings, clients: int) -> str:
    """Return an error text if a round asks more clients than exist, else an empty text; the default may ask more."""
    asked = settings.clients_per_round
    if asked <= clients or asked == Settings.model_fields["clients_per_round"].default:
        return ""
    return (
        f"clients-per-round = {asked} is more than the {clients} clients there are (clients, --nodes): set it to at most "
        f"{clients}, or to 0 to ask all of them"
    )


def learning_rate(settings: Settings, server_round: int) -> float:
    """Return the rate of a round, from 1: constant, lr-decay^(round - 1), or a cosine that reaches 0 after the last round."""
    if settings.lr_schedule == "constant":
        return settings.lr
    if settings.lr_schedule == "exponential":
        return settings.lr * settings.lr_decay ** (server_round - 1)
    import math

    length = settings.lr_rounds or settings.num_rounds
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(server_round - 1, length) / length))
