"""Central evaluation of the global model on the data set's test split."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from flwr.app import ArrayRecord

from client_app.examples import normalised
from client_app.training import channels_last, classification_loss, predictions
from federated_data.datasets import ArrayDataset
from models.cascade import Blueprint, Cascade, isolated_rng


class Evaluator:
    """Holds one model for the whole run; weights are copied into it."""

    def __init__(self, blueprint: Blueprint, data: ArrayDataset, batch_size: int) -> None:
        with isolated_rng(0):
            self.model = channels_last(Cascade(blueprint)).eval()
        self.data, self.batch_size = data, batch_size

    @torch.no_grad()
    def __call__(self, arrays: ArrayRecord) -> tuple[float, float]:
        """(loss, accuracy) on the test split, in batches of a fixed size and order."""
        for name, target in self.model.state_dict().items():
            target.copy_(torch.from_numpy(arrays[name].numpy()))
        loss, correct, seen = 0.0, 0, 0
        with all_threads():
            for start in range(0, len(self.data.test_labels), self.batch_size):
                rows = slice(start, start + self.batch_size)
                if len(self.data.test_labels[rows]) == 1 and seen:
                    break  # batch statistics of one image say nothing
                logits = self.model(normalised(self.data.test_images[rows], self.data))
                y = torch.tensor(self.data.test_labels[rows])
                loss += float(classification_loss(logits, y, "sum"))
                correct += int((predictions(logits) == y).sum())
                seen += len(y)
        return loss / seen, correct / seen


@contextmanager
def all_threads() -> Iterator[None]:
    """Use every core for the body: in-process clients may have set torch to one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, torch.multiprocessing.cpu_count()))
    try:
        yield
    finally:
        torch.set_num_threads(before)
