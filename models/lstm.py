"""PriSM's model for IMDB reviews (its authors' code): embedding 64, two LSTM layers of 256, a linear layer on the last step.

It has 920,385 parameters for the 1,000 most frequent words and the padding. As there, two classes have one logit: its sigmoid
is the probability of class 1, and the loss is the binary cross-entropy.
"""

from functools import partial

from torch import Tensor, nn

from piecework.models.cascade import Atom, Blueprint, Shape
from piecework.models.layers import scale_channels

VOCABULARY, EMBEDDED, HIDDEN, LAYERS = 1001, 64, 256, 2


class Lstm(nn.Module):
    """One LSTM layer that returns its whole sequence. The state starts at zero in every batch."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, outputs, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return out[B, length, outputs] for x[B, length, inputs]."""
        out: Tensor = self.lstm(x)[0]
        return out


class LastStep(nn.Module):
    """The head: a linear layer on the last time step."""

    def __init__(self, features: int, logits: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, logits)

    def forward(self, z: Tensor) -> Tensor:
        """Return logits[B, logits] for z[B, length, features]."""
        logits: Tensor = self.fc(z[:, -1])
        return logits


def lstm_imdb(num_classes: int, input_shape: Shape, width: float = 1.0, batch_norm: str = "running") -> Blueprint:
    """Build the atoms `embedding`, `lstm1`, `lstm2` for tokens [length] below 1,001, without norm layers."""
    (length,) = input_shape
    features = scale_channels(EMBEDDED, width)
    atoms = [Atom("embedding", partial(nn.Embedding, VOCABULARY, features), (length, features))]
    for number in range(1, LAYERS + 1):
        hidden = scale_channels(HIDDEN, width)
        atoms.append(Atom(f"lstm{number}", partial(Lstm, features, hidden), (length, hidden)))
        features = hidden
    head = partial(LastStep, features, 1 if num_classes == 2 else num_classes)
    return Blueprint("lstm-imdb", input_shape, num_classes, tuple(atoms), head, batch_norm, VOCABULARY)
