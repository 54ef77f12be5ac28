"""FedProphet, Tables 7 and 8: modules, their memory and FLOPs."""

from benchmarks.tables.shared import COMPARED, MB, beside, commands, cut_for, full_bytes, section, table
from piecework.planning.cut import label
from piecework.planning.paper_memory.fedprophet import macs

OF_FEDPROPHET = "--strategy fedprophet --memory-model fedprophet --set fedprophet.aux-pool=authors"
TABLE7 = f"--model vgg16 {OF_FEDPROPHET} --batch-size 64 --budget 60MB"
TABLE8 = f"--model resnet34 --input-shape 3x224x224 --classes 256 {OF_FEDPROPHET} --batch-size 32 --budget 224MB"
# MB and GFLOPs of the modules
VGG16 = "55.8 2.6, 46.1 4.9, 50.4 6.0, 34.7 2.4, 33.1 2.4, 59.3 1.2, 36.1 0.6"
RESNET34 = "148.6 3.9, 130.2 7.5, 130.2 7.5, 197.9 13.3, 221.6 28.1, 206.5 37.1, 204.0 20.6"


def modules(flags: str, printed: str, whole: str) -> str:
    """Tabulate modules of FedProphet: their atoms, MB, GFLOPs, and the whole model's MB."""
    cut, rows = cut_for(flags), []
    for figures, stage in zip(printed.split(", "), cut.stages, strict=True):
        (part,), (memory, flops) = stage.parts, figures.split()
        found = macs(part, cut.settings.training.batch_size) / 10**9
        rows.append([label(part), *beside(memory, cut.cost_model.bytes(part) / MB), *beside(flops, found)])
    rows.append(["the whole model", *beside(whole, full_bytes(flags) / MB), *[""] * 4])
    names = "module", *(f"MB, {c}" for c in COMPARED), *(f"GFLOPs, {c}" for c in COMPARED)
    return table(names, rows)


def text() -> str:
    """Return the section."""
    return section(
        "## FedProphet, Tables 7 and 8: modules",
        """Memory is `memory_bytes` of `modules` in 10^6 bytes, GFLOPs is `macs`, the whole model `full_memory_bytes`. All 14
        modules are cut where the paper's are; the last has the classifier.""",
        "Table 7: VGG-16, 3x32x32, 10 classes, batch 64, R_min 60 MB.",
        commands(TABLE7),
        modules(TABLE7, VGG16, "302"),
        "Table 8: ResNet-34, 3x224x224, 256 classes, batch 32, R_min 224 MB.",
        commands(TABLE8),
        modules(TABLE8, RESNET34, "1130"),
        """Deviations of FLOPs above 1 % are the paper's rounding to one digit. Two figures of modules miss the printed digit,
        the memory of ResNet-34's first and the FLOPs of VGG-16's third; why is not known. ResNet-34's total is printed as if
        it were cut off, not rounded.""",
    )
