"""Compare the models' parameters with published counts."""

from benchmarks.tables.shared import COMPARED, OF_PROFL, beside, count, cut_for, section, table
from piecework.models.zoo import MODELS

SIZES = [  # flags, what is counted, the published figure, its source
    ("--model vgg16", "parameters", "15,253,578", "FedProphet's code"),
    ("--model resnet34 --input-shape 3x224x224 --classes 256", "parameters", "21,416,000", "FedProphet's code"),
    ("--model resnet18", "parameters", "11,173,962", "PriSM's code"),
    ("--model preresnet20", "parameters in 10^6", "0.27", "FeDepth's model, rounded"),
    ("--model lenet5", "weights", "430,500", "SpaFL, A.1"),
    ("--model conv4", "weights", "804,800", "SpaFL's code"),
    ("--model conv4", "norms", "1,280", "SpaFL's code"),
    ("--model conv4 --set architecture.batch-norm=running", "entries", "807,366", "SpaFL, A.1"),
    ("--model resnet18-preact", "convolutions", "11,159,232", "SpaFL, A.1"),
    ("--model resnet18-preact --set architecture.width=0.5", "convolutions", "2,790,240", "SpaFL's code and Table 4"),
    (f"--model vgg11 {OF_PROFL}", "parameters in 10^6", "28.1", "ProFL's code, rounded"),
    ("--model vit --input-shape 3x224x224 --classes 1000", "parameters", "5,717,416", "timm's vit_tiny_patch16_224"),
]


def text() -> str:
    """Return the section."""
    rows = []
    for flags, what, printed, source in SIZES:
        found = count(cut_for(flags).blueprint, what.removesuffix(" in 10^6"))
        rows.append([f"`{flags}`", what, source, *beside(printed, found / 10**6 if "10^6" in what else found)])
    known = {flags.split()[1] for flags, *_ in SIZES}
    others = {n: count(cut_for(f"--model {n}").blueprint, "parameters") for n in sorted(MODELS) if n not in known}
    return section(
        "## Parameters",
        """`parameters` of `piecework plan FLAGS --json`. Weights are those of convolutions and linear layers without biases,
        norms the norms' weights and biases, and entries the whole state dict with the norms' buffers.""",
        table(("flags", "counted", "whose", *COMPARED), rows),
        """SpaFL counts its three models in three ways: all parameters (LeNet-5 has weights only), all entries (Conv4), weights
        of convolutions (ResNet-18). Its text counts a ResNet-18 of 64 channels in front; its code and its Table 4 have 32.""",
        f"""No published count to hold against, parameters at the usual input:
        {", ".join(f"{name} {found:,}" for name, found in others.items())}.""",
    )
