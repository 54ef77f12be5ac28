"""FeDepth, Table 1: blocks and widths."""

from benchmarks.tables.shared import COMPARED, MIB, beside, commands, cut_for, full_bytes, section, table
from piecework.planning.cut import label

OF_FEDEPTH = "--model preresnet20 --strategy fedepth --memory-model fedepth --batch-size 32"
CUT = f"{OF_FEDEPTH} --budget 19.34MiB --set memory.tolerance=0.05"
SINGLE = f"{OF_FEDEPTH} --budget 10.08MiB"
DEPTH = ["20.02", "20.02", "20.02", "14.05", "10.07", "10.07", "7.21", "5.28", "5.28"]
WIDTHS = {"0.125": "14.51", "0.1666667": "19.34", "0.3333333": "38.68", "0.5": "58.02", "1": "116.04"}


def text() -> str:
    """Return the section."""
    cut, flags = cut_for(CUT), f"{OF_FEDEPTH} --set architecture.width="
    alone = [cut.needed_bytes(cut.item((n,))) / MIB for n in range(len(cut.blueprint.atoms))]
    depth = [[f"B{n}", f"block{n}", *beside(mib, alone[n])] for n, mib in enumerate(DEPTH, start=1)]
    cuts = ["; ".join(label(part) for part in cut_for(each).stages[0].parts) for each in (CUT, SINGLE)]
    width = [[width, *beside(mib, full_bytes(flags + width) / MIB)] for width, mib in WIDTHS.items()]
    return section(
        "## FeDepth, Table 1: blocks and widths",
        """PreResNet-20, 3x32x32, 10 classes, batch 32. Blocks are `memory_bytes` of `modules` in 2^20 bytes (the paper says
        MB):""",
        commands(CUT, SINGLE),
        table(("block", "our atom", *COMPARED), depth),
        f"""The first command cuts in the paper's order: {cuts[0]}. 20.02 MiB do not fit the 19.34 MiB of a model 1/6 as wide,
        which the paper takes for equal; hence the tolerance. The second has the smaller blocks one by one: {cuts[1]}; the
        larger ones do not fit and are excluded. Neither the stem nor the head is charged.""",
        "Widths are `full_memory_bytes` for the W of the table:",
        commands(flags + "W"),
        table(("W", *COMPARED), width),
        """The paper's column is linear in the width, and so is this memory model. Its first row is labelled "1/6" there.""",
    )
