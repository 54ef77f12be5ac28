"""FedProx, the client's side: server.py names the paper and its equations."""

from functools import cache

import torch
from torch import Tensor

from piecework.client_app.client import Client, Update
from piecework.client_app.whole import train_whole
from piecework.strategies.whole.fedprox.settings import FedProxSettings
from piecework.training.attacks import Loss
from piecework.training.loop import MakeLoss, PieceModel, single_loss
from piecework.training.messages import Task


@cache
def proximal_loss(mu: float) -> MakeLoss:
    """Return what makes the loss h_k(w; w^t) = F_k(w) + mu/2 ||w - w^t||^2 (Eq. 2) of a piece that holds w^t."""
    if not mu:
        return single_loss

    def make(pieces: list[PieceModel]) -> Loss:
        plain, (piece,) = single_loss(pieces), pieces
        anchors = [p.detach().clone() for p in piece.parameters()]

        def loss(z: Tensor, y: Tensor) -> Tensor:
            squares = [(p - anchor).square().sum() for p, anchor in zip(piece.parameters(), anchors, strict=True)]
            return plain(z, y) + mu / 2 * torch.stack(squares).sum()

        return loss

    return make


def train(task: Task, client: Client) -> Update:
    """Train the whole model with the proximal term."""
    return train_whole(task, client, proximal_loss(client.settings.of(FedProxSettings).mu))
