"""The method: FedProx (Li et al., 2020), which is FedAvg with a term that keeps local weights near the global ones."""

from collections.abc import Callable

import torch
from piecework.client_app.client import Client, Update
from piecework.client_app.whole import train_whole
from piecework.models.work_item import WorkItem
from piecework.planning.cut import Cut
from piecework.planning.part import Part
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.training.attacks import Loss
from piecework.training.loop import PieceModel, single_loss
from piecework.training.messages import Task
from piecework.training.settings.table import NonNegative, Table, setting


class ProxSettings(Table):
    """The method's settings: `--set my-app.mu=0.1`."""

    name = "my-app"

    mu: NonNegative = setting(0.1, "mu, the weight of the proximal term (Eq. 2); 0 = FedAvg")


def proximal_loss(mu: float) -> Callable[[list[PieceModel]], Loss]:
    """F_k(w) + mu/2 ||w - w^t||^2 (Eq. 2)."""

    def make(pieces: list[PieceModel]) -> Loss:
        plain = single_loss(pieces)
        anchors = [p.detach().clone() for p in pieces[0].parameters()]

        def loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            pairs = zip(pieces[0].parameters(), anchors, strict=True)
            distance = torch.stack([(p - a).square().sum() for p, a in pairs]).sum()
            return plain(z, y) + mu / 2 * distance

        return loss

    return make


def train(task: Task, client: Client) -> Update:
    """The client's side."""
    return train_whole(task, client, proximal_loss(client.settings.of(ProxSettings).mu))


class ProxCut(Cut):
    """FedAvg's, but clients hold a second copy of the weights: the cost must say so."""

    def plain_part(self, item: WorkItem) -> Part:
        """Return the part that a client trains in one step, with its loss."""
        return Part(self.model, item.atoms, make_loss=proximal_loss(self.settings.of(ProxSettings).mu))


class Prox(FedAvg):
    """FedAvg with a proximal term."""

    name = "my-app"
    settings_class = ProxSettings
    cut_class = ProxCut
