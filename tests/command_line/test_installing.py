"""What `make` installs, and what Flower's own code makes of the repository as an app: a bundle, and an upload to its hub."""

import io
import os
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_files
from flwr.cli.utils import filter_paths_for_publish
from flwr.supercore.constant import MAX_FILE_BYTES, MAX_FILE_COUNT, MAX_TOTAL_BYTES
from flwr.supercore.fab_format_version import FabFormatMetadata

ROOT = Path(__file__).resolve().parents[2]
Files = dict[str, bytes | Path]


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A folder with what `make` reads, in which nothing is installed."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `make` without the options of the one that runs the tests."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "TORCH"}
    return subprocess.run(["make", *words], cwd=folder, env=own, capture_output=True, text=True, check=False)


def installs(folder: Path, *words: str) -> list[str]:
    """The command lines with which uv would install."""
    done = make(folder, "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "uv pip install" in line]


def install(folder: Path, torch: str) -> None:
    """Leave what an installation leaves, older than pyproject.toml."""
    (folder / ".venv").mkdir()
    stamp = folder / ".venv" / ".installed"
    stamp.write_text(f"{torch}\n")
    os.utime(stamp, (0, 0))


@pytest.mark.parametrize("target", ["setup", "demo", "test"])
def test_make_installs_the_build_of_torch_that_is_asked_for(fresh: Path, target: str) -> None:
    (plain,), (cpu,) = installs(fresh, target), installs(fresh, target, "TORCH=cpu")
    assert "torch" not in plain
    assert "--torch-backend='cpu' " in cpu


def test_a_later_command_keeps_the_build(fresh: Path) -> None:
    install(fresh, "cpu")
    for words in (["test"], ["test", "TORCH=cpu"]):
        (line,) = installs(fresh, *words)  # again, because pyproject.toml has changed
        assert "--torch-backend='cpu' " in line


@pytest.mark.parametrize(("there", "asked", "said"), [("cpu", "cu130", "TORCH=cpu"), ("", "cpu", "the package index")])
def test_another_build_needs_another_environment(fresh: Path, there: str, asked: str, said: str) -> None:
    install(fresh, there)
    done = make(fresh, "setup", f"TORCH={asked}")
    assert done.returncode != 0
    assert f"TORCH={asked}: .venv has torch from" in done.stderr
    assert said in done.stderr
    assert "make clean" in done.stderr
    assert (fresh / ".venv" / ".installed").read_text() == f"{there}\n"


@pytest.fixture(scope="module")
def files() -> Files:
    """The repository as Flower collects it, without hidden folders; links are left out."""
    paths = [*ROOT.glob("[!.]*"), *ROOT.glob("[!.]*/**/*"), ROOT / ".gitignore"]
    return {p.relative_to(ROOT).as_posix(): p for p in paths if p.is_file() and not p.is_symlink()}


def test_the_bundle_has_the_app_and_nothing_else(files: Files) -> None:
    others: Files = {
        "data/node-0/labels.json": b"{}",
        "runs/one/summary.json": b"{}",
        "models/test_own.py": b"",
        "training/rows.csv": b"1,2",
    }
    bundle, metadata = build_fab_from_files(files | others)
    assert metadata == FabFormatMetadata(fab_format_version=1, flwr_version_min="1.41", flwr_version_target="1.42.0")
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    expected = {"LICENSE", "README.md", "pyproject.toml", ".info/CONTENT"}
    expected |= {name for name in files if name.split("/")[0] in packages["packages"] and name.endswith(".py")}
    expected |= {name for name in files if name.split("/")[0] in ("conf", "device_profiles") and name.endswith(".toml")}
    expected = {name for name in expected if not name.startswith("piecework/new_app/")}
    names = set(zipfile.ZipFile(io.BytesIO(bundle)).namelist())
    assert names == expected
    assert not {name.split("/")[0] for name in names} & {"tests", "docs", "benchmarks", "data", "runs"}


def test_flowers_hub_takes_the_repository(files: Files) -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in filter_paths_for_publish(files)}
    assert {"README.md", "LICENSE", "pyproject.toml"} <= sizes.keys()
    assert len(sizes) <= MAX_FILE_COUNT
    assert max(sizes.values()) <= MAX_FILE_BYTES
    assert sum(sizes.values()) <= MAX_TOTAL_BYTES
    for name in sizes:
        (ROOT / name).read_text("utf-8")
