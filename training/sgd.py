"""The parameters of local training, and SGD."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakMethod

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from piecework.models.step import Step
from piecework.training.attacks import Attack
from piecework.training.optimiser_state import EightBit, Held, StatePrecision, bytes_kept, zeros

Precision = Literal["float32", "bfloat16"]
Optimiser = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True)
class TrainingConfig(Step):
    """The parameters of local training. `momentum` of SGD is in [0, 1). With `attack`, training is adversarial.

    Training takes `iterations` batches, or `epochs` epochs if `iterations` is 0. If the gradient of all parameters is longer
    than `clip_norm` > 0, it is scaled down to it; weight decay is added afterwards. In `bfloat16` forward passes run under
    torch.autocast: activations take half the memory; weights, their gradients and losses stay float32.

    `optimiser_state` is the precision in which momentum or Adam's averages are kept between steps.
    How a step fits into little memory is a `Step`.
    """

    lr: float
    momentum: float
    weight_decay: float
    batch_size: int
    epochs: int
    iterations: int = 0
    attack: Attack | None = None
    precision: Precision = "float32"
    clip_norm: float = 0.0
    optimiser_state: StatePrecision = "float32"
    optimiser: Optimiser = "sgd"

    @property
    def moments(self) -> int:
        """How many values the optimiser keeps of each parameter between steps: momentum, or Adam's two averages."""
        return int(self.momentum > 0) if self.optimiser == "sgd" else 2

    @property
    def bytes_kept(self) -> float:
        """How many bytes the optimiser keeps of each value of a large parameter between steps."""
        return sum(bytes_kept(self.optimiser_state, signed=number == 0) for number in range(self.moments))


class SGD:
    """SGD with momentum and weight decay, equal to torch.optim.SGD, whose construction would import torch's compiler.

    The momentum buffers are allocated at the start, so the first step already has the peak memory. In bfloat16 they take half
    the memory, and in 8 bits a quarter; a step computes in float32 and rounds them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        training_config: TrainingConfig,
        undecayed: Iterable[nn.Parameter] = (),
        after_step: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.parameters, self._after_step = list(parameters), after_step
        self.training_config = training_config
        self._undecayed = {id(p) for p in undecayed}
        self.buffers: list[Held] = []
        self._allocate()
        if training_config.in_backward:
            self._move_in_backward()

    def _move_in_backward(self) -> None:
        """Have each parameter move as soon as its gradient is complete, which frees the gradient; `step` then moves no other.

        What it computes is the same, bit for bit. Raises ValueError if a step needs all gradients at once.
        """
        if self.training_config.clip_norm or self.training_config.micro_batch:
            raise ValueError(
                f"a step in the backward pass with clip_norm = {self.training_config.clip_norm:g} and micro_batch = "
                f"{self.training_config.micro_batch}: clipping needs the norm of all gradients, and micro-batches add them up"
            )
        # Weak, since Python cannot see hooks: a parameter that held its optimiser, which holds it, would never be freed.
        move = WeakMethod(self._move_at_once)
        for i, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(_move_if_trained, move, i))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _move_at_once(self, number: int, parameter: Tensor) -> None:
        undecayed = id(parameter) in self._undecayed
        self._move([number], 0.0 if undecayed else self.training_config.weight_decay)
        parameter.grad = None

    def _allocate(self) -> None:
        """Allocate the state that is kept between steps."""
        if self.training_config.momentum:
            self.buffers = zeros(self.parameters, self.training_config.optimiser_state)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step and free the gradients. Parameters without a gradient do not move."""
        if self.training_config.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.training_config.clip_norm)
        with_grad = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        decayed, undecayed = (
            [i for i in with_grad if (id(self.parameters[i]) in self._undecayed) == held] for held in (False, True)
        )
        for which, weight_decay in ((decayed, self.training_config.weight_decay), (undecayed, 0.0)):
            if which:
                self._move(which, weight_decay)
        for parameter in self.parameters:
            parameter.grad = None
        for hook in self._after_step:
            hook()

    def _move(self, which: Sequence[int], weight_decay: float) -> None:
        if self.buffers and self.training_config.optimiser_state != "float32":
            for i in which:
                self._move_rounded(i, weight_decay)
            return
        torch._fused_sgd_(
            [self.parameters[i] for i in which],
            [g for i in which if (g := self.parameters[i].grad) is not None],
            [held for i in which if isinstance(held := self.buffers[i], Tensor)] if self.buffers else [],
            weight_decay=weight_decay,
            momentum=self.training_config.momentum,
            lr=self.training_config.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def _move_rounded(self, number: int, weight_decay: float) -> None:
        """Move a parameter, whose momentum is rounded between steps. Its gradient is overwritten."""
        parameter, gradient = self.parameters[number], self.parameters[number].grad
        assert gradient is not None
        if weight_decay:
            gradient.add_(parameter, alpha=weight_decay)
        momentum = gradient.add_(self.buffers[number].float(), alpha=self.training_config.momentum)
        parameter.add_(momentum, alpha=-self.training_config.lr)
        self.buffers[number].copy_(momentum)

    def state(self) -> dict[str, list[Held]]:
        """Return what is kept between steps by kind, with one value for each parameter."""
        return {"momentum": self.buffers} if self.buffers else {}

    def save(self, folder: Path) -> None:
        """Write what is kept between steps to a folder, in a file for each kind: writing copies channels-last tensors."""
        folder.mkdir(exist_ok=True)
        for kind, held in self.state().items():
            tensors = {str(i): stored_tensor(each).contiguous() for i, each in enumerate(held)}
            save_file(tensors, folder / f"{kind}.safetensors")

    def stored(self, folder: Path) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the number of each parameter, a tensor that is kept of it, and what the folder has in its place."""
        for kind, held in self.state().items():
            with safe_open(folder / f"{kind}.safetensors", framework="pt") as file:
                for i, each in enumerate(held):
                    yield i, stored_tensor(each), file.get_tensor(str(i))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read what is kept between steps from a folder."""
        for _, tensor, found in self.stored(folder):
            tensor.copy_(found)


def _move_if_trained(move: WeakMethod[Any], number: int, parameter: Tensor) -> None:
    """Move a parameter, unless its optimiser is gone."""
    if (found := move()) is not None:
        found(number, parameter)


def stored_tensor(held: Held) -> Tensor:
    """Return the tensor that has all that is kept."""
    return held.packed if isinstance(held, EightBit) else held
