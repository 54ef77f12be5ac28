"""Names of our parameters in torchvision's state dicts (timm's are the same for these layers), for pretrained weights.

These are names only: whoever loads by them must compare shapes, because the first convolution (`stem = "cifar"`), the number of
classes or the width may differ, and must skip buffers that `architecture.batch-norm = "batch"` does not have. The classifiers
of our VGGs are made for small images and never fit torchvision's.
"""

from piecework.models import resnet, vgg

RESNETS = ("resnet18", "resnet34")
NAMED = (*RESNETS, *vgg.CONVS)
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def torchvision_name_map(model_name: str, norm: str = "bn") -> dict[str, str]:
    """Map our names to torchvision's, for resnet18 and resnet34 (either stem) and the VGGs (`norm` = `bn` or `none`)."""
    if model_name in RESNETS:
        return _resnet(resnet.BLOCKS[model_name])
    if model_name in vgg.CONVS:
        return _vgg(vgg.CONVS[model_name], norm == "bn")
    raise ValueError(f"{model_name} has no torchvision names: known are {', '.join(NAMED)}")


def _resnet(blocks: tuple[int, ...]) -> dict[str, str]:
    names = {"atoms.0.conv1.weight": "conv1.weight"} | _norm("atoms.0.bn1", "bn1")
    places = [(stage, place) for stage, count in enumerate(blocks) for place in range(count)]
    for atom, (stage, place) in enumerate(places, start=1):
        ours, theirs = f"atoms.{atom}", f"layer{stage + 1}.{place}"
        for layer in ("1", "2"):
            names[f"{ours}.conv{layer}.weight"] = f"{theirs}.conv{layer}.weight"
            names |= _norm(f"{ours}.bn{layer}", f"{theirs}.bn{layer}")
        if stage and not place:
            names[f"{ours}.downsample.0.weight"] = f"{theirs}.downsample.0.weight"
            names |= _norm(f"{ours}.downsample.1", f"{theirs}.downsample.1")
    return names | {"head.fc.weight": "fc.weight", "head.fc.bias": "fc.bias"}


def _vgg(convs: tuple[int, ...], normed: bool) -> dict[str, str]:
    names: dict[str, str] = {}
    atom = index = 0
    for stage in convs:
        for _ in range(stage):
            for entry in ("weight", "bias"):
                names[f"atoms.{atom}.conv.{entry}"] = f"features.{index}.{entry}"
            if normed:
                names |= _norm(f"atoms.{atom}.bn", f"features.{index + 1}")
            atom, index = atom + 1, index + (3 if normed else 2)  # convolution, BN, ReLU
        index += 1  # pooling
    return names


def _norm(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{entry}": f"{theirs}.{entry}" for entry in NORM}
