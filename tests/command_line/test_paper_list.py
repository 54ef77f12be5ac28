"""Which preset runs which row of the papers' result tables and figures: `piecework presets --paper`, docs/results/papers.md.

EXPECTED was written down from the papers, independently of presets and of conf/papers/rows.toml. Tables of settings
(FedProphet 5 and 6, PriSM 6 to 12, SpaFL 4 and 5) and drawings of the methods have no results, and are not in it.
"""

import json
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.tables.__main__ import TABLES
from piecework.app_folder import PRESETS
from piecework.cli import app
from piecework.commands.papers import paper_tables, rows_of_preset, shipped_rows
from piecework.training.settings import SettingsError

AUTHORS = "by its authors' code"  # presets beside the paper's rows
WHERE = [f"{data} {level}" for data in ("CIFAR-10", "Caltech-256") for level in ("balanced", "unbalanced")]
RIVALS = ["jFAT", "FedDF-AT", "FedET-AT", "HeteroFL-AT", "FedDrop-AT", "FedRolex-AT", "FedRBN", "FedProphet"]
PROFL = ["AllSmall", "ExclusiveFL", "HeteroFL", "DepthFL", "ProFL"]
SPAFL = ["SpaFL", "FedAvg", "FedPM", "HeteroFL", "Fjord", "Local"]
RATIOS = ["0.2 x", "0.4 x", "0.6 x", "0.8 x"]
SETS = ["FMNIST", "CIFAR-10", "CIFAR-100"]
FAIR = ["HeteroFL", "SplitMix", "FeDepth", "m-FeDepth"]


def crossed(*parts: list[str]) -> set[str]:
    return {", ".join(row) for row in product(*parts)}


def ratios_of(*methods: str) -> set[str]:
    return crossed(list(methods), RATIOS) | {"full model"}


RESNETS = crossed(["ResNet18", "ResNet34"], ["CIFAR10", "CIFAR100"])
ALL_FOUR = crossed(["ResNet18", "ResNet34", "VGG11", "VGG16"], ["CIFAR10", "CIFAR100"])
EXPECTED = {
    ("FedProphet", "Table 1"): crossed(["Small (1x)", "Large (5x)", "Large-PT (1x)"], ["CIFAR-10", "Caltech-256"]),
    ("FedProphet", "Figure 2"): {"VGG16 on CIFAR-10", "ResNet34 on Caltech-256"},
    ("FedProphet", "Table 2"): crossed(RIVALS, WHERE),
    ("FedProphet", "Figure 6"): {"device samplings", "memory consumption"},
    ("FedProphet", "Figure 7"): "Table 2",
    ("FedProphet", "Figure 8"): {"mu = 0", "mu = 1e-5", "mu = 1e-4"},
    ("FedProphet", "Figure 9"): {f"R_min = 0.{n} R_max" for n in (2, 4, 6, 8)} | {"a single module"},
    ("FedProphet", "Table 3"): crossed(
        ["APA and DMA", "DMA without APA", "APA without DMA", "neither APA nor DMA"], WHERE
    ),
    ("FedProphet", "Figure 10"): "Table 2",
    ("FedProphet", "Table 4"): crossed(["with DMA", "without DMA"], WHERE),
    ("FedProphet", "Table 7"): {"all modules"},
    ("FedProphet", "Table 8"): {"all modules"},
    ("FeDepth", "Figure 1"): {"WideResNet, DC-Transformer"},
    ("FeDepth", "Figure 2"): {"all widths", "without x 1/8", "without x 1/4", "without x 1/2", "x 1 alone"},
    ("FeDepth", "Figure 3"): {f"r = 1/{n}" for n in (2, 4, 8, 16)},
    ("FeDepth", "Figure 6"): {"a 14-layer ResNet on MNIST"},
    ("FeDepth", "Figure 7"): {"five clients of each partition"},
    ("FeDepth", "Table 1"): {"all blocks and widths"},
    ("FeDepth", "Table 2"): {"FedAvg x 1 (Unrealistic)", "FedAvg x 1/6 (Fair)", "FedAvg x 1/8 (Lack)"}
    | {f"{method} ({budget})" for method in FAIR for budget in ("Fair", "Lack")}
    | {"FeDepth (Surplus)", "m-FeDepth (Surplus)"},
    ("FeDepth", "Figure 8"): "Table 2",
    ("FeDepth", "Figure 9"): {"FedAvg x 1", "FedAvg x 1/6", "FeDepth", "m-FeDepth"},
    ("FeDepth", "Table 3"): {"FedAvg x 1/6", *FAIR},
    ("ProFL", "Table 1"): crossed(PROFL, sorted(ALL_FOUR)),
    ("ProFL", "Table 2"): crossed(["with PMS", "without PMS"], sorted(RESNETS)),
    ("ProFL", "Figure 4"): "Table 1",
    ("ProFL", "Figure 5"): "Table 1",
    ("ProFL", "Table 3"): crossed(["Ours", "ParamAware"], sorted(RESNETS)),
    ("ProFL", "Figure 6"): {"ResNet18", "ResNet34"},
    ("PriSM", "Figure 1"): {"full model"},
    ("PriSM", "Figure 3"): {"features of three kernels"},
    ("PriSM", "Figure 4"): ratios_of("PriSM", "OrthDrop", "OrigDrop"),
    ("PriSM", "Table 1"): {"all sub-models"},
    ("PriSM", "Figure 5"): ratios_of("PriSM", "OrthDrop", "OrigDrop", "SplitMix"),
    ("PriSM", "Figure 6"): ratios_of("PriSM", "OrthDrop", "OrigDrop", "SplitMix"),
    ("PriSM", "Figure 7"): ratios_of("PriSM", "OrthDrop", "OrigDrop"),
    ("PriSM", "Table 2"): {"full model", *RATIOS},
    ("PriSM", "Table 3"): {"full model", "OrigDrop", "OrthDrop", "PriSM"},
    ("PriSM", "Figure 8"): {"full model"},
    ("PriSM", "Figure 9"): {"0.2 x"},
    ("PriSM", "Table 4"): {"all stages"},
    ("PriSM", "Table 5"): {"uniform", "softmax-based", "PriSM"},
    ("PriSM", "Figure 10"): {"1 local epoch", "2 local epochs", "4 local epochs"},
    ("PriSM", "Figure 11"): {f"{n} active clients" for n in (10, 20, 30)},
    ("SpaFL", "Table 1"): crossed(["trained thresholds", "initialisation"], SETS),
    ("SpaFL", "Table 2"): crossed(SPAFL, SETS),
    ("SpaFL", "Figure 2"): "Table 2",
    ("SpaFL", "Table 3"): crossed(["SpaFL", "without Eq. 13"], SETS),
    ("SpaFL", "Figure 3"): "Table 2",
}


def test_every_row_of_every_result_table_and_figure_has_a_preset_or_a_reason() -> None:
    tables = paper_tables()
    assert [(table.paper, table.name) for table in tables] == list(EXPECTED)
    for table in tables:
        expected, rows = EXPECTED[table.paper, table.name], [row.row for row in table.rows if AUTHORS not in row.row]
        assert sorted(rows) == ([] if isinstance(expected, str) else sorted(expected)), (table.paper, table.name)
        assert table.runs_of == (expected if isinstance(expected, str) else "")
        assert all(bool(row.preset) != bool(row.reason) for row in table.rows)


def test_the_document_has_every_row_with_its_preset_or_its_reason() -> None:
    lines = TABLES.read_text("utf-8").splitlines()
    for table in paper_tables():
        start = lines.index(f"**{table.paper}, {table.name}**: {table.about}.")
        end = next((n for n in range(start + 1, len(lines)) if lines[n].startswith(("**", "## "))), len(lines))
        part = "\n".join(lines[start:end])
        assert all(row.row in part and (f"`{row.command}`" if row.preset else row.reason) in part for row in table.rows)
        assert all(f"`{given}`" in part for given in table.columns.values())


def test_the_list_of_a_paper() -> None:
    tables = json.loads(CliRunner().invoke(app, ["presets", "--paper", "fedprophet", "--json"]).stdout)
    assert {table["paper"] for table in tables} == {"FedProphet"}
    (second,) = [table for table in tables if table["table"] == "Table 2"]
    (jfat,) = [row for row in second["rows"] if row["row"] == "jFAT, CIFAR-10 unbalanced"]
    assert (jfat["preset"], jfat["given"]) == ("jfat-cifar10", "--set fleet=fedprophet-cifar10-unbalanced")
    shown = CliRunner().invoke(app, ["presets", "--paper", "SpaFL"], env={"COLUMNS": "100"}).stdout
    assert "SpaFL, Table 2: accuracy, communication and FLOPs of the methods" in shown
    assert "spafl-cifar10 --set strategy=local" in shown
    assert "no preset: an untrained model, which guesses" in shown


def test_an_unknown_paper_and_an_unreadable_row(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["presets", "--paper", "fedprofet"])
    assert done.exit_code == 2
    assert "did you mean 'fedprophet'?" in done.stderr
    both = CliRunner().invoke(app, ["presets", "jfat", "--paper", "fedprophet"])
    assert both.exit_code == 2
    mine = tmp_path / "mine.toml"
    mine.write_text('paper = "FedProphet, the second table"\n')
    with pytest.raises(SettingsError, match="paper = 'FedProphet, the second table': expected a text, or a list"):
        rows_of_preset(str(mine))


def test_rows_are_not_inherited_and_are_no_settings(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('paper = "FedProphet, Table 2, row jFAT"\nstrategy = "jfat"\n')
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'extends = "base"\npaper = ["A, Table 1, row x: --set seed=2 --set clients=3", "A, Figure 2, row y, z"]\n'
    )
    first, second = rows_of_preset(str(mine))
    assert (first.row, first.assignments(), second.row) == ("x", ["seed=2", "clients=3"], "y, z")
    assert first.command == "mine --set seed=2 --set clients=3"


def test_a_preset_that_runs_a_row_of_an_unknown_table_is_an_error(tmp_path: Path) -> None:
    rows = tmp_path / "rows.toml"
    rows.write_text('[[table]]\npaper = "FedProphet"\nname = "Table 2"\nabout = "x"\n')
    with pytest.raises(ValueError, match=r"of which preset .* runs a row"):
        paper_tables(rows=rows)


def test_a_row_is_run_by_one_preset_only() -> None:
    places = [(row.paper, row.table, row.row) for row in shipped_rows()]
    assert len(places) == len(set(places))
    assert (PRESETS / "papers" / "rows.toml").is_file()
