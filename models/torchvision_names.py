"""Names of our parameters in torchvision's state dicts (timm's are the same for these layers), for pretrained weights.

Names only: who loads by them compares shapes, because the first convolution (`stem = "cifar"`), the number of classes
or the width may differ, and leaves out buffers that `batch-norm = "batch"` does not have. The classifiers of our VGGs
are made for small images and never fit torchvision's.
"""

from models import resnet, vgg

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def torchvision_name_map(model_name: str) -> dict[str, str]:
    """Our name -> torchvision's, for `resnet18` (either stem), `vgg11` (vgg11_bn) and `vgg16` (vgg16_bn)."""
    if model_name == "resnet18":
        return _resnet18()
    if model_name in vgg.CONVS:
        return _vgg(vgg.CONVS[model_name])
    raise ValueError(f"{model_name} has no torchvision names: known are resnet18, {', '.join(vgg.CONVS)}")


def _resnet18() -> dict[str, str]:
    names = {"atoms.0.conv1.weight": "conv1.weight"} | _norm("atoms.0.bn1", "bn1")
    for number in range(resnet.BLOCKS * len(resnet.CHANNELS)):
        stage, place = divmod(number, resnet.BLOCKS)
        ours, theirs = f"atoms.{number + 1}", f"layer{stage + 1}.{place}"
        for layer in ("1", "2"):
            names[f"{ours}.conv{layer}.weight"] = f"{theirs}.conv{layer}.weight"
            names |= _norm(f"{ours}.bn{layer}", f"{theirs}.bn{layer}")
        if stage and not place:
            names[f"{ours}.downsample.0.weight"] = f"{theirs}.downsample.0.weight"
            names |= _norm(f"{ours}.downsample.1", f"{theirs}.downsample.1")
    return names | {"head.fc.weight": "fc.weight", "head.fc.bias": "fc.bias"}


def _vgg(convs: tuple[int, ...]) -> dict[str, str]:
    names: dict[str, str] = {}
    atom = index = 0
    for stage in convs:
        for _ in range(stage):
            for entry in ("weight", "bias"):
                names[f"atoms.{atom}.conv.{entry}"] = f"features.{index}.{entry}"
            names |= _norm(f"atoms.{atom}.bn", f"features.{index + 1}")
            atom, index = atom + 1, index + 3  # convolution, BN, ReLU
        index += 1  # pooling
    return names


def _norm(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{entry}": f"{theirs}.{entry}" for entry in NORM}
