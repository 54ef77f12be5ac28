"""The memory of training steps: traced and real ones, torch.profiler's and a paper's figures, and what a device pays for."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import RecordingGrid, a_client, a_training_config, fleet_json, random_examples, run_local, tiny_settings
from torch.profiler import ProfilerActivity, profile

from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.memory import MemoryBudgetExceededError, PeakMemory
from piecework.models.cascade import Blueprint
from piecework.models.partition import (
    AtomTooLargeError,
    Piece,
    atom_names,
    exclude_input_side,
    fits,
    format_ranges,
    greedy_partition,
)
from piecework.models.zoo import build_blueprint
from piecework.planning.paper_memory.fedepth import fedepth_cost, fedepth_full_bytes
from piecework.planning.step_cost import fake_batch, fake_load, piece_cost
from piecework.strategies.cascade.fedepth.client import decompose
from piecework.strategies.cascade.fedepth.mutual import mutual_loss
from piecework.training.examples import Examples
from piecework.training.loop import LocalTrainer, MakeLoss, PieceModel, single_loss, start, train_step
from piecework.training.memory_cap import MemoryCap

ROOT = Path(__file__).resolve().parents[2]
MiB = 2**20


# ---- a traced step is the real step


def model(name: str, shape: tuple[int, int, int], batch_norm: str = "batch", **options: str) -> Blueprint:
    return build_blueprint(name, num_classes=10, input_shape=shape, batch_norm=batch_norm, **options)


CONVNET = ("convnet", (1, 8, 8))
PRERESNET = ("preresnet20", (1, 28, 28))
STEPS = [
    (CONVNET, "batch", (0,), "head", 1),
    (CONVNET, "running", (1, 2), "head", 1),
    (CONVNET, "local", (1, 2), "exits.2", 1),
    (CONVNET, "batch", (4,), "head", 1),
    (CONVNET, "batch", (0, 2, 3), "head", 1),
    (CONVNET, "running", (0, 1, 2, 3, 4), "head", 1),
    (CONVNET, "batch", (0, 1, 2, 3, 4), "head", 2),
    (PRERESNET, "batch", (0, 1), "exits.1", 1),
    (PRERESNET, "running", (4, 5, 6), "head", 1),
    (PRERESNET, "batch", (7, 8, 9), "head", 1),
    (("lenet5", (1, 28, 28)), "batch", (0,), "head", 1),
    (("lenet5", (1, 28, 28)), "batch", (0, 1), "head", 3),
    (("resnet18", (3, 16, 16)), "running", (2, 3), "head", 1),
    (("vgg11", (3, 32, 32)), "batch", (1, 2), "head", 1),
]


def step_id(case: object) -> str:
    return str(case).replace("'", "").replace(" ", "")


@pytest.mark.parametrize(("of", "batch_norm", "atoms", "head", "copies"), STEPS, ids=step_id)
def test_a_traced_step_is_the_real_one_exactly(of, batch_norm, atoms, head, copies) -> None:
    blueprint = model(*of, batch_norm)
    training_config = a_training_config(8)
    make_loss: MakeLoss = single_loss if copies == 1 else mutual_loss("paper")
    cost = piece_cost(blueprint, atoms, head, training_config, copies, make_loss)
    cap = MemoryCap(cost.peak_bytes, enforced=True)
    trainer = LocalTrainer(
        lambda: [PieceModel(blueprint, atoms, head, fake_load(blueprint)) for _ in range(copies)],
        training_config,
        make_loss,
    )
    examples = random_examples(24, blueprint.shape_before(atoms[0]))
    trainer.epoch(examples, np.random.default_rng(0), cap, "train")
    assert trainer.seen == 24
    assert cap.peak_bytes == cost.peak_bytes

    # the same step once more, with all that it left behind still alive, needs no more
    again = PeakMemory()
    with again:
        train_step(trainer._loss, trainer.optimiser, examples.read(np.arange(8)), examples.targets(np.arange(8)))
    assert again.peak <= cost.peak_bytes


def test_one_byte_less_than_the_memory_cost_is_refused() -> None:
    blueprint = model(*CONVNET)
    cost = piece_cost(blueprint, (0, 1), "head", a_training_config(8)).peak_bytes
    trainer = LocalTrainer(lambda: [PieceModel(blueprint, (0, 1), "head", fake_load(blueprint))], a_training_config(8))
    cap = MemoryCap(cost - 1, enforced=True)
    with pytest.raises(MemoryBudgetExceededError) as caught:
        trainer.epoch(random_examples(8, (1, 8, 8)), np.random.default_rng(0), cap, "train")
    assert (caught.value.needed, caught.value.allowed) == (cost, cost - 1)


def test_a_cap_that_does_not_enforce_only_measures() -> None:
    cap = MemoryCap(10, enforced=False)
    with cap.first("phase"):
        torch.zeros(100)
    assert cap.peak_bytes == 400


def test_a_cap_counts_the_first_run_of_a_phase_and_key() -> None:
    cap = MemoryCap(10**6, enforced=True)
    for phase, key, size, peak in [
        ("a", 1, 100, 400),
        ("a", 1, 500, 400),
        ("a", 2, 200, 800),
        ("b", 1, 300, 1200),
    ]:
        with cap.first(phase, key):
            torch.zeros(size)
        assert cap.peak_bytes == peak


# ---- an independent oracle: what torch's allocator reports to its profiler


def profiled_peak(work: Callable[[], object]) -> int:
    """The peak of the running sum of all allocations and frees of `work`, also those inside operators."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
    assert len(sizes) > 50
    return int(np.cumsum(sizes).max())


# The accounting charges what convolutions and pooling allocate inside themselves (piecework.device_profiles.workspace).
@pytest.mark.parametrize(
    ("of", "atoms", "batch_size"),
    [
        (PRERESNET, (0, 1), 32),
        (PRERESNET, (4, 5, 6), 32),
        (PRERESNET, tuple(range(10)), 32),
        *[
            (CONVNET, piece, 16)
            for piece in [(0,), (0, 1), (1, 2), (2,), (3,), (4,), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4)]
        ],
        (("lenet5", (1, 28, 28)), (0, 1), 32),
        (("resnet18", (1, 28, 28)), (8,), 8),
        (("vgg11", (1, 28, 28)), (0, 1, 2), 8),
    ],
    ids=step_id,
)
def test_prices_against_the_profiler(of, atoms, batch_size) -> None:
    blueprint, training_config = model(*of), a_training_config(batch_size)
    cost = piece_cost(blueprint, atoms, "head", training_config).peak_bytes

    def work() -> None:
        pieces = [PieceModel(blueprint, atoms, "head", fake_load(blueprint))]
        loss, optimiser = start(pieces, training_config, single_loss)
        z = fake_batch(blueprint, atoms[0], batch_size).fill_(0.5)
        train_step(loss, optimiser, z, torch.zeros(batch_size, dtype=torch.int64))

    measured = profiled_peak(work)
    assert measured == pytest.approx(cost, rel=0.03)


# ---- FeDepth's own memory (Table 1; facts 4.5): PreResNet-20 on CIFAR-10, batch 32


@lru_cache
def cifar_preresnet() -> Blueprint:
    return model("preresnet20", (3, 32, 32), "running")


def test_fedepth_memory_costs_by_hand() -> None:
    blueprint, half_cost = cifar_preresnet(), 4 * 32
    # bn1, conv1, bn2, conv2, block: five maps of 16x32x32; two convolutions of 16x16x9 and two norms of 16
    block1 = 2 * half_cost * 5 * 16 * 32 * 32 + 4 * (2 * 16 * 16 * 9 + 4 * 16)
    assert fedepth_cost(blueprint, [1]) == fedepth_cost(blueprint, [3]) == block1
    # bn1 of 16x32x32; conv1, bn2, conv2, shortcut, block of 32x16x16; the shortcut has no parameters
    parameters = 16 * 32 * 9 + 32 * 32 * 9 + 2 * 16 + 2 * 32
    block4 = 2 * half_cost * (16 * 32 * 32 + 5 * 32 * 16 * 16) + 4 * parameters
    assert fedepth_cost(blueprint, [4]) == block4
    assert fedepth_cost(blueprint, [0]) == 0
    assert fedepth_cost(blueprint, [0, 1, 2, 4]) == 2 * block1 + block4
    assert fedepth_cost(blueprint, [1], batch_size=64) == block1 + 2 * half_cost * 5 * 16 * 32 * 32


@pytest.mark.parametrize(
    ("block", "mib"),
    [(1, 20.02), (2, 20.02), (3, 20.02), (4, 14.05), (5, 10.07), (6, 10.07), (7, 7.21), (8, 5.28), (9, 5.28)],
)
def test_fedepth_memory_costs_of_table_1(block: int, mib: float) -> None:
    assert fedepth_cost(cifar_preresnet(), [block]) / MiB == pytest.approx(mib, abs=0.01)


def test_fedepth_full_model_and_widths_of_table_1() -> None:
    full = fedepth_full_bytes(cifar_preresnet()) / MiB
    assert full == pytest.approx(116.04, abs=0.01)
    widths = [14.51, 19.34, 38.68, 58.02, 116.04]
    assert [full * r for r in (1 / 8, 1 / 6, 1 / 3, 1 / 2, 1)] == pytest.approx(widths, abs=0.01)


# ---- cuts


@pytest.mark.parametrize(
    ("ratio", "pieces"),
    [
        (1 / 6, "0-1 2 3 4 5-6 7-9"),
        (1 / 3, "0-2 3-4 5-9"),
        (1 / 2, "0-3 4-9"),
        (1, "0-9"),
        (1 / 8, "0,4 5 6 7-8 9"),  # lack: blocks 1-3 are excluded, the stem rides with block 4
    ],
)
def test_fedepth_decompositions(ratio: float, pieces: str) -> None:
    blueprint = cifar_preresnet()
    allowed = int(1.05 * ratio * fedepth_full_bytes(blueprint))
    found = decompose(10, lambda piece: int(fedepth_cost(blueprint, piece)), allowed, atom_names(blueprint))
    assert " ".join(map(format_ranges, found)) == pieces


def test_a_sixth_by_the_letter_leaves_the_first_blocks_out() -> None:
    # 116.04 / 6 = 19.34 < 20.02: without tolerance the paper's own 1/6 client could not train blocks 1-3
    blueprint = cifar_preresnet()
    allowed = int(fedepth_full_bytes(blueprint) / 6)
    found = decompose(10, lambda piece: int(fedepth_cost(blueprint, piece)), allowed, atom_names(blueprint))
    assert found[0] == (0, 4)


@lru_cache
def preresnet_cost(piece: Piece) -> int:
    return piece_cost(model(*PRERESNET), piece, "head", a_training_config(32)).peak_bytes


@pytest.mark.parametrize(
    ("device", "ratio", "pieces"),
    [
        ("tight", 0.341, "0-1 2 3 4-6 7-9"),
        ("small", 0.49, "0-2 3-5 6-9"),
        ("medium", 0.65, "0-3 4-9"),
        ("full", 1.0, "0-9"),
    ],
)
def test_the_traced_fair_fleet(device: str, ratio: float, pieces: str) -> None:
    (profile,) = [d for d in load_fleet("fedepth-fair-traced").devices if d.name == device]
    assert profile.memory_ratio == ratio
    allowed = profile.budget(preresnet_cost(tuple(range(10))))
    found = decompose(10, preresnet_cost, allowed, atom_names(model(*PRERESNET)))
    assert " ".join(map(format_ranges, found)) == pieces


GIGABYTES = (3.0, 2.0, 1.0, 0.5, 0.5, 0.5)  # the layers of FeDepth's Figure 4
LAYERS = [f"layer{i}" for i in range(6)]


def tenths(piece: Piece) -> int:
    return round(10 * sum(GIGABYTES[atom] for atom in piece))


@pytest.mark.parametrize(
    ("gigabytes", "pieces"),
    [
        (3, [(0,), (1, 2), (3, 4, 5)]),
        (5, [(0, 1), (2, 3, 4, 5)]),
        (7.4, [(0, 1, 2, 3, 4), (5,)]),
        (7.5, [(*range(6),)]),
    ],
)
def test_greedy_partition(gigabytes: float, pieces: list[Piece]) -> None:
    assert greedy_partition(range(6), tenths, round(10 * gigabytes), LAYERS) == pieces


def test_greedy_partition_names_the_atom_that_does_not_fit() -> None:
    with pytest.raises(AtomTooLargeError) as caught:
        greedy_partition([1, 2, 3, 0], tenths, 29, LAYERS)
    assert (caught.value.name, caught.value.needed) == ("layer0", 30)
    assert str(caught.value) == (
        "atom 'layer0' needs 30 bytes, the budget allows 29 bytes: raise the budget, or lower training.batch-size"
    )
    with pytest.raises(AtomTooLargeError, match="'layer2' needs more than any cost listed"):
        greedy_partition([2], lambda _: None, 10**9, LAYERS)


def test_leave_out_skips_what_does_not_fit_but_never_the_last() -> None:
    assert exclude_input_side(range(6), tenths, 30) == [0, 1, 2, 3, 4, 5]
    assert exclude_input_side(range(6), tenths, 10) == [2, 3, 4, 5]
    assert exclude_input_side(range(6), tenths, 1) == [5]
    with pytest.raises(AtomTooLargeError, match="'layer5' needs 5 bytes"):
        decompose(6, tenths, 1, LAYERS)


def test_fits() -> None:
    assert fits(10, 10)
    assert not fits(11, 10)
    assert not fits(None, 10)


# ---- what a device pays for


def test_streaming_and_evaluating_stay_within_the_training_memory_cost(tmp_path: Path) -> None:
    client = a_client(tmp_path, tiny_settings(architecture__batch_norm="running"))
    cost = piece_cost(client.blueprint, (0,), "head", client.training_config).peak_bytes
    client.cap = MemoryCap(cost, enforced=True)
    piece = PieceModel(client.blueprint, (0,), "head", client.load())
    piece.train(False)
    features: Examples = client.stream(piece, client.local_data(0), "train-0", 1)
    assert len(features) == 40
    assert client.evaluate(piece.logits, client.validation)["val-examples"] == 20
    assert 0 < client.cap.peak_bytes <= cost


TASKS = """
import pickle, sys
from pathlib import Path
from piecework.server_app.local_grid import answer
from piecework.server_app.ordered_grid import identify
from piecework.training.answers import read_outcome
from piecework.training.parcels import unpack
identify(1)
for data, config in pickle.loads(Path(sys.argv[1]).read_bytes()):
    reply = pickle.loads(answer([data], config, 20, {}))
    assert not reply.has_error(), reply.error.reason
    outcome = read_outcome(reply.content.config_records["outcome"])
    atoms = [len(item.atoms) * getattr(item.mode, 'copies', 1) for item in outcome.done]
    print(outcome.status, *atoms, len(unpack(reply.content.array_records["arrays"])))
print(sorted(m for m in ("torch._dynamo", "torch._inductor", "sympy", "torchvision", "sklearn") if m in sys.modules))
"""


PAGED = 0.5  # of the model's step, so that its features do not stay in memory


class KeepsTheFirstTask(RecordingGrid):
    """The first train message of a run, as it was sent."""

    task = b""

    def push_messages(self, messages):
        messages = list(messages)
        if messages[0].metadata.message_type == "train" and not KeepsTheFirstTask.task:
            KeepsTheFirstTask.task = pickle.dumps(messages[0])
        return super().push_messages(messages)


@pytest.mark.slow
def test_a_client_imports_no_compiler_and_no_data_set_library(tmp_path: Path) -> None:
    tasks = []
    ways = (("fedavg", 1.0), ("fedepth", 0.53), ("m-fedepth", 0.53), ("fedepth", 2.2), ("fedavg", PAGED))
    for strategy, ratio in ways:
        settings = {"strategy": strategy, "fleet": fleet_json(one=ratio), "clients_per_round": 1}
        settings |= {"memory__fit": "page"} if ratio == PAGED else {}
        KeepsTheFirstTask.task = b""
        run_local(tmp_path / f"{strategy}-{ratio}", KeepsTheFirstTask, **settings)
        tasks.append((KeepsTheFirstTask.task, tiny_settings(**settings).to_run_config()))
    (tmp_path / "tasks.pickle").write_bytes(pickle.dumps(tasks))
    command = [sys.executable, "-c", TASKS, str(tmp_path / "tasks.pickle")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-6:] == [
        "ok 5 32",  # with running statistics
        "ok 2 1 1 1 17",
        "ok 3 1 1 25",  # with two own heads of four arrays
        "ok 10 17",
        "ok 5 32",  # in pages, with features in files
        "[]",
    ]
