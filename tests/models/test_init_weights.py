import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from piecework.commands.options import settings_from
from piecework.models.cascade import Blueprint, Cascade, isolate_rng
from piecework.models.init_weights import account, read_pretrained
from piecework.models.zoo import build_blueprint


def blueprint_of(name: str, edge: int = 32, classes: int = 10, **options: object) -> Blueprint:
    return build_blueprint(name, num_classes=classes, input_shape=(3, edge, edge), **options)


@pytest.fixture
def saved(tmp_path):
    """Writes arrays to a file, and returns its path."""

    def save(arrays: dict[str, torch.Tensor]) -> Path:
        save_file(arrays, tmp_path / "weights.safetensors")
        return tmp_path / "weights.safetensors"

    return save


def torchvision_state(name: str, **options: object) -> dict[str, torch.Tensor]:
    models = pytest.importorskip("torchvision.models")
    with isolate_rng(5):
        model = models.get_model(name, weights=None, **options)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_()
                layer.num_batches_tracked.fill_(7)
    return model.state_dict()


def test_resnet_takes_everything_where_the_classes_are_as_many(saved):
    state = torchvision_state("resnet34", num_classes=256)
    arrays, excluded = read_pretrained(saved(state), blueprint_of("resnet34", 224, 256))
    model = Cascade(blueprint_of("resnet34", 224, 256))
    assert excluded == []
    assert list(arrays) == list(model.state_dict())  # all of the model, in its order
    assert len(arrays) == len(state) == 218
    for our, their in (
        ("atoms.0.conv1.weight", "conv1.weight"),
        ("atoms.16.bn2.running_mean", "layer4.2.bn2.running_mean"),
        ("atoms.4.downsample.1.num_batches_tracked", "layer2.0.downsample.1.num_batches_tracked"),
        ("head.fc.bias", "fc.bias"),
    ):
        assert np.array_equal(arrays[our], state[their].numpy())
    assert arrays["atoms.0.bn1.num_batches_tracked"].dtype == np.int64
    model.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()})


def test_a_classifier_or_stem_of_another_size_is_not_loaded(saved):
    arrays, excluded = read_pretrained(saved(torchvision_state("resnet18")), blueprint_of("resnet18"))
    assert sorted(excluded) == ["conv1.weight", "fc.bias", "fc.weight"]
    assert len(arrays) == 122 - 3
    assert "atoms.0.bn1.weight" in arrays


def test_vgg_leaves_out_torchvisions_classifier(saved):
    models = pytest.importorskip("torchvision.models")
    with isolate_rng(5):
        model = models.vgg16_bn(weights=None, init_weights=False)
    model.classifier = nn.Sequential(nn.Linear(512, 20), nn.ReLU(), nn.Dropout(), nn.Linear(20, 1000))
    arrays, excluded = read_pretrained(saved(model.state_dict()), blueprint_of("vgg16"))
    assert len(arrays) == 13 * 7
    assert {name.split(".")[0] for name in arrays} == {"atoms"}
    assert sorted(excluded) == ["classifier.0.bias", "classifier.0.weight", "classifier.3.bias", "classifier.3.weight"]
    assert np.array_equal(arrays["atoms.12.bn.running_var"], model.features[41].running_var.numpy())


def test_weights_of_a_vgg_without_batch_norm_are_not_mixed_in(saved):
    # Some numbers of layers are those of other layers there, whose biases have the right shape: a layer goes whole.
    models = pytest.importorskip("torchvision.models")
    with isolate_rng(5):
        plain = models.vgg16(weights=None, init_weights=False).features.state_dict()
    path = saved({f"features.{name}": value for name, value in plain.items()})
    assert list(read_pretrained(path, blueprint_of("vgg16"))[0]) == ["atoms.0.conv.weight", "atoms.0.conv.bias"]
    arrays, excluded = read_pretrained(path, blueprint_of("vgg16", norm="none"))
    assert (len(arrays), excluded) == (26, [])


def test_batch_statistics_have_no_running_ones(saved):
    arrays, excluded = read_pretrained(
        saved(torchvision_state("resnet18", num_classes=10)), blueprint_of("resnet18", 64, batch_norm="batch")
    )
    assert len(arrays) == 62
    assert {name.rpartition(".")[2] for name in excluded} == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_our_own_names_in_any_float(saved, dtype):
    blueprint = blueprint_of("convnet")
    with isolate_rng(1):
        state = Cascade(blueprint).state_dict()
    path = saved({name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()})
    arrays, excluded = read_pretrained(path, blueprint)
    assert excluded == []
    for name, value in state.items():
        expected = value.to(dtype).float() if value.is_floating_point() else value
        assert arrays[name].dtype == value.numpy().dtype
        assert np.array_equal(arrays[name], expected.numpy())


def test_looking_for_names_draws_no_random_numbers(saved):
    path = saved(torchvision_state("resnet18"))
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    read_pretrained(path, blueprint_of("resnet18"))
    assert torch.equal(torch.rand(3), expected)


def test_nothing_that_fits_is_an_error_that_shows_both(saved):
    path = saved({f"layer{i}.weight": torch.zeros(2, i) for i in range(9)})
    with pytest.raises(ValueError, match="none of its 9 arrays fits resnet18") as caught:
        read_pretrained(path, blueprint_of("resnet18"))
    message = str(caught.value)
    assert str(path) in message
    assert "layer0.weight (2, 0), layer1.weight (2, 1)" in message
    assert "atoms.0.conv1.weight (64, 3, 3, 3)" in message
    assert "these names or torchvision's" in message
    with pytest.raises(ValueError, match="these names, for torchvision has no such model"):
        read_pretrained(path, blueprint_of("convnet"))


def test_a_narrower_model_takes_nothing(saved):
    with pytest.raises(ValueError, match="none of its 122 arrays fits resnet18"):  # not even num_batches_tracked
        read_pretrained(saved(torchvision_state("resnet18")), blueprint_of("resnet18", 64, width=0.5))


def test_files_that_cannot_be_used(tmp_path, saved):
    blueprint = blueprint_of("convnet")
    with pytest.raises(ValueError, match=r"training.init-weights = .*absent\.safetensors: there is no such file"):
        read_pretrained(tmp_path / "absent.safetensors", blueprint)
    pickled = tmp_path / "model.pth"
    torch.save(Cascade(blueprint).state_dict(), pickled)
    with pytest.raises(ValueError, match=r"model\.pth cannot be read as safetensors.*Pickles .* are not read"):
        read_pretrained(pickled, blueprint)
    state = Cascade(blueprint).state_dict()
    name = next(name for name, value in state.items() if value.is_floating_point())
    state[name].view(-1)[0] = torch.nan
    path = saved(state)
    with pytest.raises(ValueError, match=re.escape(f"{name} has values that are not finite")):
        read_pretrained(path, blueprint)


def test_the_sentence_for_the_log():
    path, three = Path("w.safetensors"), dict.fromkeys("abc", np.zeros(1))
    assert account(path, three, []) == "took 3 of 3 arrays from w.safetensors"
    assert account(path, three, ["fc.weight", "fc.bias"]) == (
        "took 3 of 5 arrays from w.safetensors; excluded: fc.weight, fc.bias"
    )
    assert account(path, three, [*"uvwxyz", "last"]).endswith("excluded: u, v, w, x, y, z and 1 more")


def test_a_file_named_on_the_command_line_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings_from("", ["training.init-weights=w.safetensors"]).training.init_weights == str(
        tmp_path / "w.safetensors"
    )
    assert settings_from("", []).training.init_weights == ""
