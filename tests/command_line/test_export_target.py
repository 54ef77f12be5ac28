"""Where `piecework export` writes: what is refused names what the user gave, and a failed export leaves what was there."""

import json
import os
from pathlib import Path

import pytest
from disk_helpers import files_of_at_most
from helpers import TRIO, run_local
from other_users import NOBODY
from typer.testing import CliRunner

from piecework.cli import app
from piecework.exports.formats import FORMATS, ExportError, export_run
from piecework.exports.target import require_target
from piecework.server_app.records import RunDir

DEFAULTS = {name: each.default for name, each in FORMATS.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_local(tmp_path_factory.mktemp("exported"), strategy="fedavg", **TRIO)


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [
        (
            "onnx",
            "none/a.onnx",
            "{to} cannot be written: there is no folder {tmp}/none; create the folder, or name another",
        ),
        (
            "onnx",
            "file/a.onnx",
            "{to} cannot be written: {tmp}/file is a file; create the folder, or name another place",
        ),
        ("onnx", "folder", "{to} is a folder, and onnx writes one file: name the file, as in {to}/model.onnx"),
        ("csv", "file", "{to} is a file, and csv writes a folder of files: name another place (--out)"),
        (
            "onnx",
            "a.pt",
            "{to} has the extension of torchscript, and the format is onnx, which writes one file: name it "
            "{tmp}/a.onnx, or ask for --format torchscript",
        ),
        (
            "torchscript",
            "a.PTE",
            "{to} has the extension of executorch, and the format is torchscript, which writes one file",
        ),
        ("csv", "a.csv", "{to} looks like a file, and csv writes a folder of files: leave the extension out"),
        (
            "csv",
            "a.onnx",
            "{to} has the extension of onnx, and the format is csv, which writes a folder of files: name it "
            "{tmp}/a, or ask for --format onnx",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused_at_once(form: str, name: str, message: str, tmp_path: Path) -> None:
    """Before the run is looked at, which is none here; and nothing is made there."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("of before")
    done = CliRunner().invoke(app, ["export", str(tmp_path), "--format", form, "--out", str(tmp_path / name), "--json"])
    assert done.exit_code == 2
    assert message.format(to=tmp_path / name, tmp=tmp_path) in json.loads(done.stdout)["reason"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "of before"


@pytest.mark.parametrize(("form", "name"), [("onnx", "model.bin"), ("onnx", "MODEL.ONNX"), ("csv", "tables.v2")])
def test_another_extension_is_the_users_own(form: str, name: str, tmp_path: Path) -> None:
    require_target(tmp_path / name, form, DEFAULTS)


def test_a_folder_of_others_is_refused_at_once() -> None:
    """As another user than root, whom nothing keeps out."""
    root = os.getuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        with pytest.raises(
            ExportError, match=r"^/model\.pt cannot be written: nothing may be written in /; name another"
        ):
            require_target(Path("/model.pt"), "torchscript", DEFAULTS)
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torchscript", "onnx", "csv", "tensorboard"])
def test_a_full_disk_is_said_and_what_was_there_stays(
    form: str, run: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    default = Path(FORMATS[form].default)
    target = tmp_path / default
    before = target if default.suffix else target / "rounds.csv"
    before.parent.mkdir(exist_ok=True)
    before.write_text("of before")
    with files_of_at_most(200), pytest.raises(ExportError) as caught:
        export_run(run.path, form, target)
    assert str(caught.value).startswith(f"{target} cannot be written: File too large; ")
    assert str(caught.value).endswith(" bytes are free there. Free some, or name another place (--out)")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [before]
    assert sorted(path.name for path in tmp_path.iterdir()) == [default.name]
    assert before.read_text() == "of before"
    assert "Traceback" not in capfd.readouterr().err


def test_a_file_by_a_relative_name(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert export_run(run.path, "torchscript", Path("a.pt")).path == Path("a.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
