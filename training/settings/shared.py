"""The tables that all strategies share: data, architecture, training, attack, evaluation, memory, messages and faults."""

import math
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from piecework.device_profiles.names import did_you_mean
from piecework.training.settings.table import (
    AtLeastOne,
    BatchSize,
    Bytes,
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveBytes,
    Table,
    able,
    case,
    setting,
)

OF_ALL_MODELS = {  # what models are built with besides options of their own
    "width": "architecture.width",
    "batch_norm": "architecture.batch-norm",
    "initialisation": "training.initialisation",
    "name": "model",
    "num_classes": "that of the data",
    "input_shape": "that of the data, or data.image-size",
}
ATTACKED = case(training__adversarial=True) + able("always_attacks")
PERSONAL = case(evaluation__mode="personal") + able("personal")
FlowerPartitioner = Literal[  # of flwr-datasets, those that divide rows by numbers and lists
    "flwr:ContinuousPartitioner",
    "flwr:DirichletPartitioner",
    "flwr:DistributionPartitioner",
    "flwr:ExponentialPartitioner",
    "flwr:GroupedNaturalIdPartitioner",
    "flwr:IidPartitioner",
    "flwr:InnerDirichletPartitioner",
    "flwr:LinearPartitioner",
    "flwr:NaturalIdPartitioner",
    "flwr:PathologicalPartitioner",
    "flwr:ShardPartitioner",
    "flwr:SizePartitioner",
    "flwr:SquarePartitioner",
]
# To fit a step into a small budget, those that cost the least time first.
WAYS = ("step-in-backward", "recompute-cheap", "micro-batch", "recompute", "page")


class DataSettings(Table):
    """How the data set is obtained, divided among the clients and prepared."""

    download: bool = setting(False, "download the data set to data-dir if it is not there")
    partition: Literal["iid", "dirichlet", "pathological", "skewed", "natural", FlowerPartitioner] = setting(
        "dirichlet",
        "how training examples are divided. iid: evenly at random; dirichlet: class proportions are drawn per class; "
        "pathological: few classes per client; skewed: mostly few classes; natural: by the data set's groups (writers); "
        "flwr:NAME: by a partitioner of Flower's (extra hub)",
    )
    partition_options: str = setting(
        "",
        "arguments of Flower's partitioner, as in alpha=0.3,self_balancing=true or partition_sizes=[100,200]",
        ({"data.partition": get_args(FlowerPartitioner)},),
    )
    partition_alpha: Positive = setting(
        1.0,
        "concentration of the Dirichlet partition: towards 0 a client has one class, large values approach iid",
        case(data__partition="dirichlet"),
    )
    partition_balanced: bool = setting(
        True, "all clients have as many examples, Dirichlet partition", case(data__partition="dirichlet")
    )
    partition_cap: bool = setting(
        False,
        "clients that already have n / clients examples get nothing of later classes, unbalanced Dirichlet partition",
        case(data__partition="dirichlet", data__partition_balanced=False),
    )
    partition_classes: AtLeastOne = setting(
        2,
        "classes per client, pathological and skewed partition",
        ({"data.partition": ("pathological", "skewed")},),
    )
    partition_skew: Annotated[float, Field(ge=0, le=1)] = setting(
        0.8,
        "fraction of a client's examples from its own classes, skewed partition; 1 = only those",
        case(data__partition="skewed"),
    )
    partition_groups: Count = setting(
        0,
        "groups (writers) per client, natural partition; 0 = all groups, divided among the clients",
        case(data__partition="natural"),
    )
    input_columns: str = setting(
        "", "columns of a table or of a hub's data set that are the input, with commas; empty = found, or all features"
    )
    label_column: str = setting(
        "", "column that is the label; empty = the only one that declares classes, or that has a usual name"
    )
    group_column: str = setting(
        "", "column of the groups that natural partition divides, such as a person; empty = none"
    )
    public_fraction: Fraction = setting(
        0.0, "fraction of the training examples set aside for the server's distillation before partitioning"
    )
    public: str = setting(
        "", "the server's public data instead: folder:DIR, npz:FILE, or the name of a data set", able("public")
    )
    validation_fraction: Fraction = setting(0.2, "fraction of a client's examples kept for validation; 0 = none")
    augment: bool = setting(False, "random flip and crop of images, drawn once per cache fill")
    pixel_scale: Literal["normalised", "unit", "raw"] = setting(
        "normalised",
        "pixels of 8-bit images as the model gets them: with mean 0 and standard deviation 1, from 0 to 1, or from 0 to 255",
    )
    image_size: Annotated[int, Field(ge=0, le=4096)] = setting(
        0, "height and width in pixels to which images are resized as they are read; 0 = those of the data set"
    )


class ArchitectureSettings(Table):
    """What the model looks like, besides its name."""

    width: Annotated[float, Field(gt=0, le=4)] = setting(1.0, "factor by which all channels are multiplied")
    options: str = setting("", "options of the model, as in stem=cifar,classifier=profl")
    batch_norm: Literal["auto", "running", "measured", "static", "batch", "local"] = setting(
        "auto",
        "statistics of batch norms in evaluation. running: kept in training, averaged with their layer; "
        "measured: training uses those of a batch, clients measure the others after the round; static: so too, and all "
        "clients measure after the last round (HeteroFL); batch: always those of the batch, on which predictions then "
        "depend; local: norms stay with the clients (FedBN); auto = static for HeteroFL, local for FedRBN, "
        "measured where clients train other sub-models or blocks, else running",
        case(architecture__norm="batch"),
    )
    norm: Literal["batch", "group", "frozen"] = setting(
        "batch",
        "norms of convolutional models. group: of two groups; frozen: batch norms that keep the statistics of "
        "training.init-weights. Both depend on no other example, so micro-batches change nothing (memory.fit)",
        able("other_norms"),
    )

    def parse_options(self) -> dict[str, str]:
        """Return `options` as a dictionary. Raises ValueError."""
        pairs = [pair.partition("=") for pair in self.options.split(",") if pair.strip()]
        if bad := [name for name, equals, value in pairs if not (name.strip() and equals and value.strip())]:
            raise ValueError(f"architecture.options = {self.options!r}: {bad[0]!r} is not NAME=VALUE")
        found = {name.strip(): value.strip() for name, _, value in pairs}
        if given := [name for name in found if name in OF_ALL_MODELS]:
            raise ValueError(
                f"architecture.options = {self.options!r}: {given[0]} is no option of one model: it is "
                f"{OF_ALL_MODELS[given[0]]}"
            )
        return found


class TrainingSettings(Table):
    """What a client does in a round, and the rates of all rounds."""

    init_weights: str = setting("", "a .safetensors file to start from, with our names or torchvision's; empty = none")
    initialisation: Literal["default", "kaiming-normal"] = setting(
        "default",
        "initial weights of convolutions: torch's own, or Kaiming's normal distribution with the fan-out, whose standard "
        "deviation is 2.4 times as large where there are as many inputs as outputs",
    )
    local_epochs: AtLeastOne = setting(2, "passes over the client data in a round, for every sub-problem")
    local_iterations: Count = setting(0, "batches instead of local-epochs, for every sub-problem; 0 = epochs")
    batch_size: BatchSize = setting(16, "examples in a batch")
    optimiser: Literal["sgd", "adam", "adamw"] = setting(
        "sgd",
        "what clients train with: SGD, or Adam or AdamW, which keep two values of each parameter and want rates near 0.001",
        able("optimisers"),
    )
    lr: Positive = setting(0.1, "learning rate of the first round")
    lr_schedule: Literal["constant", "cosine", "exponential"] = setting("cosine", "how the rate falls over the rounds")
    lr_rounds: Count = setting(
        0,
        "length of the cosine in rounds; 0 = num-rounds of the first start; a resumed run may change it",
        case(training__lr_schedule="cosine"),
    )
    lr_decay: Annotated[float, Field(gt=0, le=1)] = setting(
        0.994, "factor of the rate per round, exponential schedule", case(training__lr_schedule="exponential")
    )
    momentum: Fraction = setting(0.9, "momentum of SGD; 0 = none", able("optimisers", training__optimiser="sgd"))
    weight_decay: NonNegative = setting(
        5e-4, "weight decay; 0 = none. With AdamW it scales parameters, and else it is added to the gradient"
    )
    clip_norm: NonNegative = setting(0.0, "maximum gradient norm of a local step; 0 = off")
    torch_threads: AtLeastOne = setting(1, "threads of a client's training")
    accelerator: Literal["none", "cuda"] = setting("none", "cuda: clients train on their GPU")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "bfloat16: clients' forward passes under autocast, which halves activations"
    )
    optimiser_state: Literal["float32", "bfloat16", "8-bit"] = setting(
        "float32",
        "how clients keep momentum and Adam's averages between steps: bfloat16 takes half the bytes (but leaves Adam's squares "
        "in float32), 8-bit a quarter, with a scale for every 256 values",
        able("optimisers", memory__model="traced"),
    )
    adversarial: bool = setting(
        False, "train on adversarial examples, if the strategy can; FedProphet, jFAT and FedRBN always do"
    )


class AttackSettings(Table):
    """Projected gradient descent (PGD) on images, pixels in [0, 1]."""

    epsilon: Annotated[float, Field(gt=0, le=1)] = setting(8 / 255, "radius of the L-infinity ball around an image")
    step_size: Annotated[float, Field(gt=0, le=1)] = setting(
        2 / 255, "how far a step of adversarial training moves a pixel", ATTACKED
    )
    steps: AtLeastOne = setting(10, "PGD steps of adversarial training", ATTACKED)
    warmup: Count = setting(0, "clean rounds before adversarial ones, in every stage", ATTACKED)


class EvaluationSettings(Table):
    """When, where and on what the model is evaluated, and when its accuracy ends the run."""

    every: Count = setting(1, "rounds between evaluations; 0 = only at the end")
    mode: Literal["auto", "central", "personal"] = setting(
        "auto",
        "central: the server evaluates the model; personal: clients on their parts of the test split, mean over "
        "them; auto = central if there is one model",
    )
    clients: Count = setting(0, "clients drawn for a personal evaluation; 0 = all", PERSONAL)
    on_clients_every: Count = setting(
        0, "rounds between evaluations of the new model on the validation examples of the round's clients; 0 = never"
    )
    batch_size: BatchSize = setting(256, "examples in a batch of evaluation")
    attack_steps: AtLeastOne = setting(20, "PGD steps of evaluation", ATTACKED)
    attack_examples: Count = setting(1000, "test images attacked at an evaluation of adversarial training; 0 = none")
    autoattack_examples: Count = setting(
        0, "test images under AutoAttack at the end, which needs torchattacks; 0 = none"
    )
    target_accuracy: Annotated[float, Field(ge=0, le=1)] = setting(0.0, "stop early when reached; 0 = off")
    patience: Count = setting(0, "stop after this many evaluations without a better accuracy; 0 = off")


class MemorySettings(Table):
    """How memory is predicted and enforced."""

    model: Literal["traced", "fedepth", "fedprophet", "prism", "profl"] = setting(
        "traced", "traced: bytes of the real training step, which are enforced; else a paper's formula, for planning"
    )
    tolerance: Annotated[float, Field(ge=0, le=1)] = setting(
        0.0, "allowed excess over the budget, as a fraction of it; for papers' memory models only"
    )
    enforce: bool = setting(True, "false: clients neither refuse nor stop at their budget; for tests")
    reserve: Bytes = setting(64 * 2**20, "bytes that a device with device = 'auto' keeps free")
    feature_cache: bool = setting(True, "false: features of frozen atoms are computed again every epoch")
    feature_cache_bytes: PositiveBytes = setting(
        4 * 10**9, "maximum bytes on disk of stored features, of all clients together"
    )

    keep_experiments: Count = setting(
        0, "stores of other experiments that a device with a state-dir keeps, those used last; 0 = all of them"
    )
    features: Literal["float32", "bfloat16"] = setting(
        "float32", "precision of features that clients store; bfloat16 takes half the disk, and half the time to read"
    )
    fit: str = setting(
        "",
        "ways in which a step may fit a small budget, preferred first: step-in-backward, recompute-cheap, recompute, page, "
        "micro-batch; auto = the fastest of all; empty = plain steps alone",
        able("fit", memory__model="traced"),
    )

    @model_validator(mode="after")
    def _require_known_ways(self) -> Self:
        """Raise ValueError for an unknown or repeated way in `fit`."""
        if unknown := [way for way in self.ways if way not in ("auto", *WAYS)]:
            near = did_you_mean(unknown[0], WAYS)
            raise ValueError(f"memory.fit = {self.fit!r}: {unknown[0]!r} is none of auto, {', '.join(WAYS)}{near}")
        if len(set(self.ways)) < len(self.ways):
            raise ValueError(f"memory.fit = {self.fit!r}: expected auto, or each way once, as in {','.join(WAYS)}")
        return self

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in `fit`; with auto, auto and all ways."""
        named = tuple(way.strip() for way in self.fit.split(",")) if self.fit.strip() else ()
        return (*named, *WAYS) if named == ("auto",) else named

    @property
    def named_ways(self) -> tuple[str, ...]:
        """The ways that `fit` names one by one, which a run must be able to go; `auto` leaves out those that it cannot."""
        return () if self.fit.strip() == "auto" else tuple(way for way in self.ways if way != "auto")

    @property
    def enforced(self) -> bool:
        """Whether budgets are enforced on clients: only for traced bytes, and if the checks are on."""
        return self.model == "traced" and self.enforce

    @property
    def excess(self) -> float:
        """The allowed excess over a budget, as a fraction of it: `tolerance`, or infinite if the checks are off."""
        return self.tolerance if self.enforce else math.inf


class MessagesSettings(Table):
    """How the server and its clients exchange messages."""

    max_bytes: PositiveBytes = setting(2**25, "maximum bytes of frozen atoms in a message")
    max_in_flight: Count = setting(
        0, "messages that are out at once; 0 = twice the workers, at least 4; all of them in a deployment"
    )
    round_timeout: Positive = setting(
        3600.0, "seconds a round waits for replies; with workers = 1 a client in this process is not interrupted"
    )
    node_timeout: Positive = setting(120.0, "seconds to wait for the clients to connect")


class FaultsSettings(Table):
    """What a run tolerates from its clients."""

    min_clients: Count = setting(
        0, "minimum that must connect at the start and train in a round; 0 = all at the start, one in a round"
    )
    max_empty_rounds: AtLeastOne = setting(1, "rounds in a row in which no client trained before the run aborts")
    over_sample: Count = setting(
        0,
        "clients asked in addition to clients-per-round: a round ends when clients-per-round of them have answered, on the "
        "engines local and ray by the simulated clock; 0 = none",
    )
    accept_late: Count = setting(
        0,
        "most rounds after which an answer that came too late for its own round enters the model; 0 = it is dropped",
        able("late"),
    )
    deadline_factor: NonNegative = setting(
        0.0,
        "a client's answer is awaited for this multiple of its predicted time, at least 1, on the engines local and ray by the "
        "simulated clock; 0 = for messages.round-timeout",
    )
    deadline_floor: NonNegative = setting(60.0, "least seconds for which an answer is awaited")
    update_norm_limit: NonNegative = setting(
        10.0, "limit on a unit's update, in multiples of the median accepted norm, at first the model's; 0 = off"
    )
    allow_untrained: bool = setting(
        False, "run even if no client can train some part of the model, which keeps its initial weights"
    )

    @model_validator(mode="after")
    def _no_deadline_is_before_the_predicted_time(self) -> Self:
        if 0 < self.deadline_factor < 1:
            raise ValueError(
                f"faults.deadline-factor = {self.deadline_factor:g}: a client that takes its predicted time would be late; set "
                "it to 1 or more, or to 0 for no deadlines"
            )
        return self
