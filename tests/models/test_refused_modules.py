"""What devices cannot have of a module outside this project is said before a run begins."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.models.cascade import Cascade, initial_state
from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source
from piecework.models.imported.objects import dump_object, name_object
from piecework.models.zoo import build_blueprint


class Head(nn.Module):
    """A linear layer, to which the modules below add one thing each that devices cannot have."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x.flatten(1))


class Listed(Head):
    """Keeps a tensor in a list."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__(classes)
        self.scales = [torch.ones(64)]


class Hidden(Head):
    """Keeps layers in a list, where torch does not see them."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__(classes)
        self.layers = [nn.Linear(64, 64)]


class Rotated(Head):
    """Has complex numbers."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__(classes)
        self.register_buffer("turns", torch.ones(32, dtype=torch.complex64))


class Rounded(Head):
    """Has numbers that numpy does not have."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__(classes)
        self.register_buffer("scale", torch.ones(64, dtype=torch.bfloat16))


class Auxiliary(Head):
    """Returns more in training."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__(classes)

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


class Named(Auxiliary):
    """Returns its logits by name."""

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.fc(x.flatten(1))}


class Stateful(nn.Module):
    """Goes on from the state of the batch before."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__()
        self.rnn, self.fc = nn.GRU(8, 8, batch_first=True), nn.Linear(8, classes)
        self.state: Any = None

    def forward(self, x: Tensor) -> Any:
        sequence, self.state = self.rnn(x[:, 0], self.state)
        return self.fc(sequence[:, -1])


class Turned(nn.Module):
    """Reads tokens, and keeps a table of the length of the pass before."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__()
        self.embed, self.middle, self.fc = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, classes)
        self.length: Any = None
        self.table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        if z.shape[1] != self.length:
            self.length = z.shape[1]
            self.table = torch.arange(self.length).cos()[:, None]
        return self.fc(self.middle(z * self.table).mean(1))


class Scaled(nn.Module):
    """A layer whose `reset_parameters` takes an argument."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, 64))
        self.reset_parameters(0.5)

    def reset_parameters(self, scale: float) -> None:
        nn.init.constant_(self.weight, scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.dropout(x.flatten(1), 0.1, self.training), self.weight)


class Sliced(nn.Module):
    """Keeps a slice of a buffer as another one."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(64, classes)
        self.register_buffer("table", torch.zeros(64))
        self.register_buffer("first", self.table[:10])

    def forward(self, x: Tensor) -> Tensor:
        self.table.add_(1.0)
        return self.fc(x.flatten(1) + self.table) + self.first


class Lent(Sliced):
    """Lends a part of a layer's weights to another."""

    def __init__(self, classes: int, shape: Any) -> None:
        super().__init__(classes, shape)
        self.table, self.first = torch.ones(64), torch.ones(classes)
        self.small = nn.Linear(64, 5, bias=False)
        self.small.weight = nn.Parameter(self.fc.weight.data[:5])


class Masked(Head):
    """Has a hook on a parameter."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__(classes)
        self.fc.weight.register_hook(lambda gradient: gradient * 0.0)


class Followed(Head):
    """Has a hook on a parameter's whole gradient."""

    def __init__(self, classes: int, _: Any) -> None:
        super().__init__(classes)
        self.fc.bias.register_post_accumulate_grad_hook(lambda parameter: None)


WRONG = {
    "Masked": r"fc.weight has a hook, .*: change gradients in the forward pass, or by a hook on the layer \(register_full",
    "Followed": "fc.bias has a hook",
    "Sliced": r"'first' lies in the memory of 'table', .*: keep a copy of it \(clone\(\)\)",
    "Lent": "'small.weight' lies in the memory of 'fc.weight'",
    "Listed": "Listed keeps 'scales' outside its state dict",
    "Hidden": "Hidden keeps layers in 'layers', .*: make it an nn.ModuleList",
    "Rotated": "Rotated: the buffer 'turns' is torch.complex64, which messages do not hold",
    "Rounded": r"Rounded: the buffer 'scale' is torch.bfloat16, .* hold: register it as torch.float32 \(float\(\)\), and use",
    "Auxiliary": r"returns a tuple for 2 examples in training \(self.training\): expected logits of shape \(2, 10\); have",
    "Named": r"returns a dict for 2 examples: expected logits of shape \(2, 10\); have",
    "Stateful": "Stateful keeps 'state' from one forward pass to the next",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_module(name: str) -> None:
    with pytest.raises(ValueError, match=WRONG[name]):
        build_blueprint(f"{__file__}:{name}", num_classes=10, input_shape=(1, 8, 8))


def test_a_table_that_tokens_have_left_is_refused() -> None:
    with pytest.raises(ValueError, match="Turned keeps 'length' from one forward pass to the next"):
        build_blueprint(f"{__file__}:Turned", num_classes=10, input_shape=(12,))


def test_an_object_that_cannot_be_written_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(64, 10)))
    with pytest.raises(
        ValueError, match=r"cannot be sent to worker processes \(RuntimeError: .*\): write a function of"
    ):
        dump_object(name_object(module))


@pytest.mark.parametrize("name", ["Masked", "Followed"])
def test_a_hook_on_a_parameter_of_an_object_is_seen(name: str) -> None:
    with pytest.raises(ValueError, match="has a hook"):
        name_object({"Masked": Masked, "Followed": Followed}[name](10, None))


def test_a_layer_whose_reset_takes_an_argument_has_the_weights_of_its_module() -> None:
    arrays = dict(initial_state(build_blueprint(f"{__file__}:Scaled", num_classes=10, input_shape=(1, 8, 8)), 0))
    assert (arrays["atoms.0.weight"] == 0.5).all()


class Titled(nn.Module):
    """Layers, one of which has a name of torch.fx's, and one in a dict."""

    def __init__(self, name: str, key: str) -> None:
        super().__init__()
        self.first, self.name, self.key = nn.Linear(64, 16), name, key
        self.add_module(name, nn.Linear(16, 16))
        self.experts, self.last = nn.ModuleDict({key: nn.Linear(16, 16)}), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.experts[self.key](self._modules[self.name](self.first(x.flatten(1)))))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "key"),
    [*((name, "one") for name in ("graph", "meta", "code", "_code", "recompile")), ("mine", "class")],
)
def test_a_layer_whose_name_is_taken_keeps_the_module_whole(name: str, key: str) -> None:
    module = Titled(name, key)
    found = cut(Source(name_object(module), 10, (1, 8, 8), "running"))
    taken = "experts.class" if key == "class" else name
    assert found.reason == f"Titled: torch.fx cannot call what has the name {taken!r}: rename it"
    assert found.names == ("titled",)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(
        Cascade(build_blueprint(name_object(module), num_classes=10, input_shape=(1, 8, 8)))(x), module(x)
    )


def test_a_layer_in_a_layer_may_have_any_name() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Sequential(OrderedDict(graph=nn.Linear(64, 8), code=nn.Linear(8, 10))))
    assert cut(Source(name_object(module), 10, (1, 8, 8), "running")).names == ("1_graph",)
