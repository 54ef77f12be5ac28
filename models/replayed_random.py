"""Random numbers that are drawn again: the state of torch's generators, to which they return for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomState:
    """The state of the CPU's generator and of that of `device`, at the time at which this is made."""

    def __init__(self, device: torch.device) -> None:
        self._gpus = [device] if device.type == "cuda" else []
        self._states = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in self._gpus]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the random numbers that followed this state; afterwards the generators go on as if none had been drawn."""
        with torch.random.fork_rng(devices=self._gpus):
            torch.set_rng_state(self._states[0])
            for gpu, state in zip(self._gpus, self._states[1], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            yield
