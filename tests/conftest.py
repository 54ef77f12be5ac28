"""Where the tests find data: env PIECEWORK_DATA, else the folder beside the checkout, if it is there."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if "PIECEWORK_DATA" not in os.environ and (ROOT.parent / "shared" / "data").is_dir():
    os.environ["PIECEWORK_DATA"] = str(ROOT.parent / "shared" / "data")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with Fashion-MNIST, or the test is skipped."""
    folder = os.environ.get("PIECEWORK_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("no data: set PIECEWORK_DATA to a folder with torchvision's files")
    return Path(folder)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Converted data sets of a test session do not touch the user's cache."""
    os.environ["PIECEWORK_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def grids() -> Callable[..., type[Any]]:
    """Makes a recording grid with other attributes."""
    from helpers import RecordingGrid

    def make(base: type[Any] = RecordingGrid, **attributes: Any) -> Any:
        return type("Kept", (base,), attributes)

    return make


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script `piecework` of an environment that has the wheel, and no checkout.

    Flower is installed beside it, because its scripts start processes of the environment they lie in; other dependencies are
    those of this environment, whose own .pth files (an editable install) are not read there.
    """
    folder = tmp_path_factory.mktemp("wheel")
    uv, own = [sys.executable, "-m", "uv"], folder / "environment"
    python = own / "bin" / "python"
    subprocess.run([*uv, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)], check=True)
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(own)], check=True)
    packages = [str(next(folder.glob("*.whl"))), f"flwr=={version('flwr')}"]
    subprocess.run(
        [*uv, "pip", "install", "--quiet", "--no-deps", "--compile-bytecode", "--python", str(python), *packages],
        check=True,
    )
    (site,) = own.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return own / "bin" / "piecework"
