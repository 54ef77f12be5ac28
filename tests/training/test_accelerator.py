"""Where a client computes, as far as it can be tested without a GPU, and bfloat16. What needs a GPU is in test_cuda.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    TRIO,
    a_blueprint,
    a_training_config,
    clients_of,
    fleet_json,
    model_of,
    random_examples,
    run_local,
    same,
    tiny_settings,
)
from model_helpers import initial
from process_helpers import a_message, in_a_fresh_process
from typer.testing import CliRunner

from piecework.cli import app
from piecework.device_profiles.memory import PeakMemory
from piecework.engines.cluster.book import gpu_fraction
from piecework.models.static_norms import is_statistic
from piecework.planning.step_cost import fake_batch, piece_cost
from piecework.server_app.records import RunDir
from piecework.training.accelerator import (
    CPU,
    NoAcceleratorError,
    allocator_limit,
    budget_within,
    find_device,
    to_device,
)
from piecework.training.attacks import Attack
from piecework.training.loop import (
    PieceModel,
    adversary,
    classification_loss,
    in_precision,
    load_for_device,
    single_loss,
    start,
)
from piecework.training.memory_cap import MemoryCap, is_out_of_memory
from piecework.training.settings import Settings, SettingsError

META = torch.device("meta")  # tensors without data: another device that every machine has
no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU here: what is told without one cannot be seen"
)
LACKING = r"setting training.accelerator = 'cuda': torch \S+ (finds no GPU|was built without CUDA) here"

# ---- the choice


def test_without_an_accelerator_clients_use_the_processor() -> None:
    assert find_device("none") == CPU
    assert Settings().training.accelerator == "none"


@no_gpu
def test_without_a_gpu_the_error_names_the_setting_and_what_to_do() -> None:
    with pytest.raises(NoAcceleratorError, match=LACKING) as caught:
        find_device("cuda")
    assert str(caught.value).endswith("or set training.accelerator = none")


@no_gpu
def test_a_run_on_this_machine_is_refused_before_it_begins(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["run", "--set", "training.accelerator=cuda", "--output-dir", str(tmp_path / "runs")]
    )
    assert done.exit_code != 0
    assert "setting training.accelerator = 'cuda'" in " ".join(done.output.split())
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/rounds.jsonl"))


@no_gpu
def test_a_client_without_a_gpu_says_why_it_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no client trained in round 1"):
        run_local(tmp_path, training__accelerator="cuda", **TRIO)
    clients = clients_of(RunDir(tmp_path / "run"))
    assert [client["status"] for client in clients] == ["failed"] * 3
    for client in clients:
        assert client["reason"].startswith("setting training.accelerator = 'cuda': torch ")


@pytest.mark.parametrize(
    ("workers", "gpus", "share"),
    [(4, 0, 0.0), (1, 1, 1.0), (4, 1, 0.25), (3, 1, 0.3333), (4, 2, 0.5), (3, 2, 0.5), (5, 2, 0.3333), (2, 4, 1.0)],
)
def test_ray_divides_the_gpus_evenly_among_clients(workers: int, gpus: int, share: float) -> None:
    assert gpu_fraction(workers, gpus) == share


# ---- the processor, as if there were no accelerators


TOUCHED = """
import pickle, sys
from pathlib import Path
import torch
from piecework.server_app.local_grid import answer
from piecework.server_app.ordered_grid import identify
identify(1)
for path in sys.argv[1:]:
    task, config = pickle.loads(Path(path).read_bytes())
    reply = pickle.loads(answer([task], config, 20, {}))
    assert not reply.has_error(), reply.error.reason
    print(reply.content.config_records["outcome"]["status"], reply.content.metric_records["metrics"]["gpu-peak"])
print(torch.cuda.is_initialized(), [m for m in ("torch._dynamo", "sympy") if m in sys.modules])
"""


@pytest.mark.slow
def test_without_an_accelerator_nothing_of_cuda_is_touched(tmp_path: Path) -> None:
    tasks = []
    for precision in ("float32", "bfloat16"):
        (tmp_path / precision).mkdir()
        tasks.append(a_message(tmp_path / precision, strategy="fedavg", training__precision=precision))
    assert in_a_fresh_process(TOUCHED, *tasks).splitlines() == ["ok 0", "ok 0", "False []"]


def test_on_the_processor_everything_stays_where_it_is() -> None:
    tensor, examples = torch.zeros(2), random_examples(4, (2, 3, 3))
    assert to_device(tensor, CPU) is tensor
    assert examples.on(CPU) is examples


# ---- another device


def frozen(unit: str, module: torch.nn.Module) -> None:
    module.eval().requires_grad_(False)


def test_a_module_moves_as_it_is() -> None:
    blueprint = a_blueprint("preresnet20", (3, 8, 8), "running")
    here, moved = (load_for_device(blueprint, frozen, device)("atoms.4") for device in (CPU, META))
    assert moved.state_dict().keys() == here.state_dict().keys()
    for name, value in here.state_dict().items():
        other = moved.state_dict()[name]
        assert (other.device.type, other.shape, other.stride()) == ("meta", value.shape, value.stride())
        assert other.dtype == value.dtype
    assert not any(parameter.requires_grad for parameter in moved.parameters())
    assert not moved.training


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_adversarial_step_stays_on_its_device(norm: Any) -> None:
    """Also the pixels' mean and deviation, the random start, labels, and what is left of gradients."""
    blueprint, std = a_blueprint(batch_norm="running"), (0.5,) if norm == "linf" else ()
    attack = Attack(norm, 0.1, 0.05, 2, mean=std, std=std)
    piece = PieceModel(blueprint, range(5), "head", load_for_device(blueprint, initial(blueprint), META))
    loss, optimiser = start([piece], a_training_config(4, attack=attack), single_loss)
    examples = random_examples(8, (1, 8, 8)).on(META)
    z, y = examples.read(np.arange(4)), examples.targets(np.arange(4))
    assert (z.device, y.device, z.stride()) == (META, META, fake_batch(blueprint, 0, 4).stride())
    adversarial = adversary([piece], loss, attack, 0)(z, y)
    value = loss(adversarial, y)
    value.backward()  # type: ignore[no-untyped-call]
    assert adversarial.device == value.device == META
    for parameter, buffer in zip(optimiser.parameters, optimiser.buffers, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.device == buffer.device == META
        assert parameter.stride() == buffer.stride()


def test_memory_is_counted_on_the_device_only() -> None:
    memory = PeakMemory(device="meta")
    with memory:
        batch = torch.zeros(1000)  # waits in the host's memory
        there = to_device(batch, META)
        total = there + 1
        weight = torch.zeros(16, 16, 3, 3, device=META)
        z = torch.nn.functional.conv2d(torch.zeros(2, 16, 8, 8, device=META), weight, padding=1)
    # two vectors, the weight, a map in and a map out: nothing for what oneDNN would take
    assert memory.peak == 4 * (2 * 1000 + 16 * 16 * 9 + 2 * 2 * 16 * 64)
    assert len(batch) == len(total) == 1000
    assert z.shape == (2, 16, 8, 8)


def test_what_a_gpu_says_when_it_has_no_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


# ---- bfloat16

FEDRBN: dict[str, Any] = {
    "strategy": "fedrbn",
    "fedrbn__clean_weight": 0.5,
    "architecture__batch_norm": "running",
    "attack__steps": 2,
    "evaluation__attack_examples": 0,
    "fleet": fleet_json(one=2.2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"strategy": "fedavg", "evaluation__on_clients_every": 1},  # its budget is just what a step needs
        {"strategy": "fedepth", "fleet": fleet_json(one=0.6)},
        {"strategy": "fedepth", "fleet": fleet_json(one=2.2)},  # two models learn mutually
        {"strategy": "fedepth", "fleet": fleet_json(one=1.7)},  # so do two, of which one is trained block by block
        {
            "strategy": "fedprophet",
            "num_rounds": 2,
            "fedprophet__stage_rounds": 1,
            "fedprophet__r_min": "0.8x",
            "attack__steps": 2,
            "evaluation__attack_steps": 2,
            "evaluation__attack_examples": 0,
        },
        FEDRBN,
    ],
    ids=["fedavg", "fedepth", "mutual", "pair", "fedprophet", "fedrbn"],
)
def test_a_round_in_bfloat16_takes_what_was_predicted(tmp_path: Path, case: dict[str, Any]) -> None:
    exact, half = (
        run_local(tmp_path, **TRIO, **case, training__precision=precision, run_name=precision)
        for precision in ("float32", "bfloat16")
    )
    for server_round in range(1, len(half.rounds()) + 1):
        for client, other in zip(clients_of(half, server_round), clients_of(exact, server_round), strict=True):
            assert client["status"] == "ok"
            assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
            assert client["budget"] < 0.85 * other["budget"]  # a share of a step in the same precision
            assert 0 < client["evaluation_peak"] <= client["budget"] or "client_evaluation_every" not in case
    assert all(array.dtype != np.float16 for array in model_of(half).values())
    assert not same(model_of(exact), model_of(half))
    # cut otherwise, blocks read features of blocks whose running statistics have begun to settle, or not yet
    for name, array in ((n, a) for n, a in model_of(exact).items() if not is_statistic(n)):
        np.testing.assert_allclose(model_of(half)[name], array, atol=0.05)


def test_losses_and_what_evaluation_reads_are_float32() -> None:
    blueprint, training_config = a_blueprint(batch_norm="running"), a_training_config(4, precision="bfloat16")
    piece = PieceModel(blueprint, range(5), "head", load_for_device(blueprint, initial(blueprint)))
    loss, _ = start([piece], training_config, single_loss)
    z, y = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    value = loss(z, y)
    value.backward()  # type: ignore[no-untyped-call]
    assert value.dtype == torch.float32
    assert {p.grad.dtype for p in piece.parameters() if p.grad is not None} == {torch.float32}
    piece.train(False)
    with torch.no_grad():
        rounded, exact = (
            in_precision(piece.logits, training_config)(z),
            in_precision(piece.logits, a_training_config(4))(z),
        )
    assert rounded.dtype == exact.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    # of bfloat16 logits, the loss that their float32 values have: bfloat16 would round it to 2.296875
    logits = torch.zeros(3, 10, dtype=torch.bfloat16)
    assert classification_loss(logits, y[:3]).item() == pytest.approx(np.log(10), abs=1e-6)


def test_the_setting_decides_memory_costs_in_bfloat16() -> None:
    from piecework.planning.costs import cost_model_for
    from piecework.planning.part import whole_model

    blueprint, settings = a_blueprint(), tiny_settings(training__precision="bfloat16")
    training_config = replace(a_training_config(settings.training.batch_size), precision="bfloat16")
    expected = piece_cost(blueprint, range(5), "head", training_config).peak_bytes
    assert cost_model_for(settings, blueprint).bytes(whole_model(blueprint)) == expected
    assert cost_model_for(settings, blueprint, precision="float32").bytes(whole_model(blueprint)) > expected


def test_papers_memory_models_know_float32_only() -> None:
    with pytest.raises(
        SettingsError, match=r"precision = 'bfloat16': memory\.model prism knows float32 only, use traced"
    ):
        tiny_settings(training__precision="bfloat16", memory__model="prism")


def test_an_accounting_without_a_gpu_has_no_gpu_peak() -> None:
    cap = MemoryCap(10**6, enforced=True)
    with cap.task(), cap.first("train"):
        total = torch.zeros(1000).sum()
    assert total == 0
    assert (cap.peak_bytes, cap.gpu_peak_bytes) == (4004, 0)


def test_the_allocators_limit_is_the_budget_with_its_allowances() -> None:
    """100 MiB and a quarter of it for fragments, 128 MiB of workspaces, and 8 MiB that were reserved before."""
    assert allocator_limit(100 * 2**20, 8 * 2**20) == (125 + 128 + 8) * 2**20


@pytest.mark.parametrize("free", [0, 2**20, 10 * 2**30 + 7])
def test_a_budget_within_free_memory_has_room_for_its_allowances(free: int) -> None:
    budget = budget_within(free)
    assert budget == 0 or free - 2 < allocator_limit(budget, 0) <= free


def test_eight_runs_fit_one_card() -> None:
    """Each has a budget within an eighth of 80 GiB less a CUDA context of 600 MiB: their limits and contexts are no more."""
    card, context = 80 * 2**30, 600 * 2**20
    budget = budget_within(card // 8 - context)
    assert budget > 7 * 2**30
    assert 8 * (allocator_limit(budget, 0) + context) <= card
