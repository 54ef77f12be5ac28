"""Clients on a GPU: skipped where there is none. What can be tested without one is in test_accelerator.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    TRIO,
    a_blueprint,
    a_client,
    a_training_config,
    clients_of,
    fleet_json,
    model_of,
    random_examples,
    run_local,
    tiny_settings,
)
from model_helpers import initial
from zoo_helpers import SMALL, blueprint_of

import piecework.client_app.whole
from piecework.client_app.client import Client, Update
from piecework.models.recompute import recompute
from piecework.models.zoo import MODELS, is_token_model
from piecework.planning.step_cost import piece_cost
from piecework.server_app.records import RunDir
from piecework.training.accelerator import (
    CPU,
    FRAGMENTS,
    WORKSPACES,
    find_device,
    free_memory,
    limit_allocator,
    release_cache,
)
from piecework.training.attacks import Attack, Loss, by_backward, pgd
from piecework.training.examples import Examples
from piecework.training.loop import LocalTrainer, PieceModel, load_for_device
from piecework.training.memory_cap import MemoryCap, is_out_of_memory
from piecework.training.messages import Task
from piecework.training.sgd import Precision

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
MiB = 2**20
PROPHET: dict[str, Any] = {
    "strategy": "fedprophet",
    "fedprophet__r_min": "0.8x",
    "attack__steps": 2,
    "evaluation__attack_steps": 2,
    "evaluation__attack_examples": 0,
}


def gpu() -> torch.device:
    return find_device("cuda")


# ---- rounds


@pytest.mark.parametrize(
    "case",
    [{"strategy": "fedavg"}, {"strategy": "fedepth", "fleet": fleet_json(one=0.6)}, PROPHET],
    ids=["fedavg", "fedepth", "fedprophet"],
)
def test_a_round_gives_the_weights_of_the_processor(tmp_path: Path, case: dict[str, Any]) -> None:
    here, there = (
        run_local(tmp_path, **TRIO, **case, training__accelerator=accelerator, run_name=accelerator)
        for accelerator in ("none", "cuda")
    )
    for name, array in model_of(here).items():
        np.testing.assert_allclose(model_of(there)[name], array, rtol=0, atol=1e-3, err_msg=name)
    for client in clients_of(there):
        assert client["status"] == "ok"
        assert 0 < client["measured_peak"] <= client["predicted_peak"] <= client["budget"]
        assert client["measured_peak"] <= client["gpu_peak"] <= client["measured_peak"] + WORKSPACES
    assert {client["gpu_peak"] for client in clients_of(here)} == {0}


def test_all_stages_of_fedprophet(tmp_path: Path) -> None:
    """Features of fixed modules, the pre-round query of perturbations and streamed validation, too."""
    run_dir = run_local(
        tmp_path,
        **TRIO,
        **PROPHET,
        training__accelerator="cuda",
        num_rounds=3,
        fedprophet__stage_rounds=1,
        fleet="reference-step",
    )
    assert len({record["stage"] for record in run_dir.rounds()}) > 1
    for record in run_dir.rounds():
        assert {client["status"] for client in record["clients"]} == {"ok"}
        assert record["client_adversarial_accuracy"] is not None


@pytest.mark.parametrize("case", [{"strategy": "fedavg"}, PROPHET], ids=["fedavg", "fedprophet"])
def test_a_round_in_bfloat16(tmp_path: Path, case: dict[str, Any]) -> None:
    run_dir = run_local(tmp_path, **TRIO, **case, training__accelerator="cuda", training__precision="bfloat16")
    for client in clients_of(run_dir):
        assert client["status"] == "ok"
        assert 0 < client["measured_peak"] <= client["budget"]
    assert all(np.isfinite(array).all() for array in model_of(run_dir).values())


# ---- memory


def greedy(task: Task, client: Client) -> Update:
    """A trainer that takes what no accounting sees."""
    raise AssertionError(len([torch.empty(2**26, device=client.device, dtype=torch.uint8) for _ in range(100)]))


def test_past_the_allocators_limit_the_answer_is_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecework.client_app.whole, "train", greedy)
    with pytest.raises(RuntimeError, match="3 refused for memory"):
        run_local(tmp_path, **TRIO, strategy="fedavg", training__accelerator="cuda")
    for client in clients_of(RunDir(tmp_path / "run")):
        assert client["status"] == "memory"
        assert client["reason"].startswith("the device ran out of memory: OutOfMemoryError")
        allowed = client["budget"] * (1 + FRAGMENTS) + WORKSPACES
        assert 64 * MiB <= client["gpu_peak"] <= allowed + 32 * MiB  # and what cuBLAS held before
    assert len(torch.empty(2**30, device=gpu(), dtype=torch.uint8)) == 2**30  # the limit was lifted


def test_the_limit_holds_during_the_body_only() -> None:
    device = gpu()
    with limit_allocator(device, 100 * MiB) as peak:
        fits = torch.empty(100 * MiB, device=device, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(400 * MiB, device=device, dtype=torch.uint8)
        assert is_out_of_memory(caught.value)
        assert peak() >= 100 * MiB
    assert len(torch.empty(400 * MiB, device=device, dtype=torch.uint8)) > len(fits)
    with limit_allocator(device, None):
        assert len(torch.empty(400 * MiB, device=device, dtype=torch.uint8)) > len(fits)
    assert 0 < free_memory(device) < torch.cuda.get_device_properties(device).total_memory


def test_a_pause_frees_the_gpu(tmp_path: Path) -> None:
    client = a_client(
        tmp_path,
        tiny_settings(architecture__batch_norm="running"),
        device=gpu(),
        cap=MemoryCap(10**9, enforced=True, device=gpu()),
    )
    trainer = LocalTrainer(
        lambda: [PieceModel(client.blueprint, (0, 1), "head", client.load())], client.training_config
    )
    release_cache()
    before = torch.cuda.memory_allocated()
    trainer.epoch(client.local_data(0).on(gpu()), client.rng("batches", 0, 0), client.cap, "train")
    workspaces = torch.cuda.memory_allocated() - before
    client.save(trainer.pieces[0])
    trainer.pause(client.store.root / "optimiser")
    assert torch.cuda.memory_allocated() - before < workspaces
    trainer.epoch(client.local_data(0).on(gpu()), client.rng("batches", 0, 1), client.cap, "train")
    (piece,) = trainer.finish()
    assert {p.device for p in piece.parameters()} == {gpu()}


# ---- steps


def trained(name: str, device: torch.device, precision: Precision) -> tuple[list[torch.Tensor], int, int]:
    """Weights after two batches under attack (tokens: clean), the accounting's peak, and the cost."""
    blueprint = blueprint_of(name, **SMALL.get(name, {}))
    rng, shape = np.random.default_rng(0), blueprint.shape_before(0)
    if is_token_model(name):
        tokens = rng.integers(0, blueprint.vocabulary, (8, *shape))
        examples = Examples(lambda positions: torch.from_numpy(tokens[positions]), rng.integers(0, 2, 8))
    else:
        examples = random_examples(8, shape, classes=blueprint.num_classes)
    attack = None if is_token_model(name) else Attack("l2", 0.1, 0.05, 2)
    training_config, atoms = (
        a_training_config(4, lr=0.01, attack=attack, precision=precision),
        range(len(blueprint.atoms)),
    )
    load = load_for_device(blueprint, initial(blueprint), device)
    trainer, cap = (
        LocalTrainer(lambda: [PieceModel(blueprint, atoms, "head", load)], training_config),
        MemoryCap(10**12, enforced=False, device=device),
    )
    with cap.task():
        trainer.epoch(examples.on(device), rng, cap, "train")
    weights = [parameter.detach().cpu() for parameter in trainer.pieces[0].parameters()]
    return weights, cap.peak_bytes, piece_cost(blueprint, atoms, "head", training_config).peak_bytes


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_is_trained_within_its_memory_cost(name: str, precision: Precision) -> None:
    weights, peak, cost = trained(name, gpu(), precision)
    assert all(weight.isfinite().all() for weight in weights)
    assert peak > 0
    if name not in ("deit-tiny", "lstm-imdb", "vit"):  # their layers keep other tensors than on the processor
        assert peak <= cost


def test_starts_of_attacks_do_not_depend_on_the_device() -> None:
    z = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    loss: Loss = lambda z, y: z.square().sum()  # noqa: E731
    for norm in ("linf", "l2"):
        attack = Attack(norm, 0.3, 0.1, 0)  # type: ignore[arg-type]
        here, there = (
            pgd(by_backward(loss), z.to(device), torch.empty(0), attack, torch.Generator().manual_seed(1))
            for device in (CPU, gpu())
        )
        assert there.device == gpu()
        torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-6)


def test_batches_arrive_in_their_memory_format() -> None:
    examples, positions = random_examples(20, (3, 8, 8)), np.arange(5)
    there = examples.on(gpu())
    assert there.read(positions).stride() == examples.read(positions).stride() == (192, 1, 24, 3)
    assert torch.equal(there.read(positions).cpu(), examples.read(positions))
    assert there.targets(positions).tolist() == examples.targets(positions).tolist()
    blueprint = a_blueprint("preresnet20", (3, 8, 8))
    load = load_for_device(blueprint, initial(blueprint), gpu())
    weights = [p for i in range(len(blueprint.atoms)) for p in load(f"atoms.{i}").parameters() if p.dim() == 4]
    assert weights
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def test_a_recomputed_segment_drops_the_same_numbers() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).to(gpu())
    z, gradients = torch.ones(8, 64, device=gpu()), []
    for run in (layers, lambda z: recompute(layers, z, [layers])):
        torch.manual_seed(3)
        run(z).sum().backward()
        gradients.append(layers[0].weight.grad.clone())
        layers.zero_grad()
    assert torch.equal(*gradients)
