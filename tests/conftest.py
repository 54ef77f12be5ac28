"""Where the tests find data: env PIECEWORK_DATA, else the folder beside the checkout, if it is there."""

import os
import sys
from collections.abc import Callable
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
