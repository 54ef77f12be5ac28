"""What functions, files and classes of the user's keep from one pass to the next is theirs again after a plan."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_settings

from piecework.models.cascade import Cascade, unset_weights
from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source
from piecework.models.imported.source import find_make, own_name
from piecework.models.zoo import build_blueprint
from piecework.plans.plan import make_plan
from piecework.plans.question import ask

DIGIT = (1, 8, 8)


@pytest.mark.parametrize("strategy", ["fedepth", "fedavg"])
@pytest.mark.parametrize("name", ["function", "function_in_a_whole_layer", "method", "file", "attribute"])
def test_a_module_computes_after_a_plan_what_it_did_before(name: str, strategy: str) -> None:
    model = f"{Path(__file__).with_name('own_caches.py')}:{name}"
    make = find_make(model)
    net, x = make(10, DIGIT).eval(), torch.randn(3, *DIGIT, generator=torch.Generator().manual_seed(0))
    own = vars(sys.modules[make.__module__])
    for warm in (False, True):  # whether the module's own passes have kept a mask before
        own["cached_mask"].cache_clear()
        own["MASKS"].clear()
        own["Attention"].tables.clear()
        expected = net(x) if warm else None
        cut.cache_clear()
        settings = tiny_settings(model=model, strategy=strategy, clients=2, dataset="digits")
        assert make_plan(settings, ask(settings))["modules"]
        found = net(x)
        assert found.isfinite().all()
        assert expected is None or torch.equal(found, expected)


@pytest.mark.parametrize("name", ["function", "function_in_a_whole_layer", "method", "file", "attribute", "layer"])
def test_its_parts_compute_what_it_does(name: str) -> None:
    model = f"{Path(__file__).with_name('own_caches.py')}:{name}"
    net, x = find_make(model)(10, DIGIT).eval(), torch.randn(3, *DIGIT)
    with unset_weights():
        cascade = Cascade(build_blueprint(model, num_classes=10, input_shape=DIGIT, batch_norm="running")).eval()
    assert list(cut(Source(model, 10, DIGIT, "running")).names) == ["embed", "layers_0", "layers_1"]
    arrays = net.state_dict()
    cascade.load_state_dict({each: arrays[own_name(each)] for each in cascade.state_dict()})
    assert torch.equal(cascade(x), net(x))
