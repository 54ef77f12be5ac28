"""FedProx (Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith, "Federated Optimization
in Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127), the server's side.

    Algorithm 2, line 2, select clients             strategies/server.py: MethodServer.draw
    lines 3 and 4, w_k ~ argmin h_k(w; w^t), Eq. 2  fedprox/client.py: proximal_loss, train
    line 6, aggregate                               strategies/method.py: Method.combine, Method.finish

FedAvg with a proximal term, which keeps the weights of a client near w^t, those of the model that it got:

    min_w h_k(w; w^t) = F_k(w) + mu/2 ||w - w^t||^2      (Eq. 2)

A client holds w^t beside w, and its memory cost says so. The term counts all parameters, also those of norms.

Where it differs from the paper: updates are weighted by examples as FedAvg's are, where the paper draws clients by their
examples and takes the plain mean. All clients make as many steps, where the paper lets slow ones stop early with a
gamma-inexact solution.
"""

from dataclasses import replace

from piecework.models.work_item import WorkItem
from piecework.planning.cut import Cut
from piecework.planning.part import Part
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.strategies.whole.fedprox.client import proximal_loss
from piecework.strategies.whole.fedprox.settings import FedProxSettings
from piecework.training.methods import METHODS


class FedProxCut(Cut):
    """The whole model with the loss of Eq. 2."""

    def plain_part(self, item: WorkItem) -> Part:
        """Return the whole model, beside which a client holds w^t."""
        return replace(super().plain_part(item), make_loss=proximal_loss(self.settings.of(FedProxSettings).mu))


class FedProx(FedAvg):
    """FedAvg over clients whose weights stay near the model that they got."""

    name = "fedprox"
    can = METHODS["fedprox"].can
    cut_class = FedProxCut
