"""FedAvg (H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas, "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629).

Algorithm 1: w <- sum_k n_k / n w_k over the clients of a round. Every client trains the whole model, at `architecture.width`.

Where it differs from the paper: clients have budgets. One whose budget is too small refuses the task. With `memory.fit` it may
compute its batches in micro-batches, recompute segments of the model, or page through them; it refuses if no such step fits.
With `fedavg.client-weights = equal` the server takes the plain mean. With `fedavg.fine-tuning-epochs` clients fine-tune the
model before a personal evaluation (client.py); what they make of it is evaluated and not kept.
"""

from typing import Any

from piecework.federation.aggregation import CheckedUpdate
from piecework.planning.assignment import Assignment, Context
from piecework.strategies.method import Method, Round
from piecework.strategies.whole.fedavg.settings import FedAvgSettings
from piecework.training.methods import METHODS


class FedAvg(Method):
    """Federated averaging over the clients that have enough memory for the whole model."""

    name = "fedavg"
    can = METHODS["fedavg"].can

    def assign(self, ctx: Context) -> Assignment:
        """Return the whole model."""
        return self.work(self.cut.whole)

    def weight(self, update: CheckedUpdate) -> int:
        """Return the weight of an update in the mean: its number of examples, or that of every other."""
        return 1 if self.settings.of(FedAvgSettings).client_weights == "equal" else update.examples

    def details(self, current: Round) -> dict[str, Any]:
        """Return how many clients fine-tuned the model that they evaluated, if they were to."""
        if not self.settings.of(FedAvgSettings).fine_tuning_epochs or current.evaluation is None:
            return {}
        return {"fine_tuned": sum("fine-tuned" in metrics for metrics in current.answers.values())}
