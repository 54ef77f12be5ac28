"""Where the tests find data: env PIECEWORK_DATA, else the folder beside the checkout, if it is there."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: pytest's workers share the cores
ROOT = Path(__file__).resolve().parents[1]
ROOM = 8 * 2**30  # bytes
sys.path.insert(0, str(ROOT))
if "PIECEWORK_DATA" not in os.environ and (ROOT.parent / "shared" / "data").is_dir():
    os.environ["PIECEWORK_DATA"] = str(ROOT.parent / "shared" / "data")


def pytest_configure() -> None:
    """Keep the tests' files in memory where there is room: runs wait for the disk at every checkpoint."""
    heed_interrupts()
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def heed_interrupts() -> None:
    """Let this process, and what it starts, heed Ctrl-C: a shell starts background jobs with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests first that wait for processes, so that the other workers use the cores meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with Fashion-MNIST, or the test is skipped."""
    folder = os.environ.get("PIECEWORK_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("no data: set PIECEWORK_DATA to a folder with torchvision's files")
    return Path(folder)


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test session, which its workers share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def own_cache(session_folder: Path) -> None:
    """The workers of a test session share converted data sets and traces, and do not touch the user's cache."""
    os.environ["PIECEWORK_CACHE"] = str(session_folder / "cache")


@pytest.fixture(scope="session", autouse=True)
def untrimmed() -> Iterator[None]:
    """Do not trim the heap, or look into it: it is large and full of holes here, and that took a tenth of the suite's time.

    What a client or the server gives back is measured in processes of their own.
    """
    from piecework.training import memory_cap

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_cap, "trim_heap", lambda: None)
        patch.setattr(memory_cap, "free_in_heap", lambda: 0)
        yield


@pytest.fixture
def grids() -> Callable[..., type[Any]]:
    """Makes a recording grid with other attributes."""
    from helpers import RecordingGrid

    def make(base: type[Any] = RecordingGrid, **attributes: Any) -> Any:
        return type("Kept", (base,), attributes)

    return make


@pytest.fixture(scope="session")
def wheel(session_folder: Path) -> Path:
    """The script `piecework` of an environment that has the wheel, and no checkout.

    Flower is installed beside it, because its scripts start processes of the environment they lie in; other dependencies are
    those of this environment, whose own .pth files (an editable install) are not read there.
    """
    folder = session_folder / "wheel"
    folder.mkdir(exist_ok=True)
    environment = folder / "environment"
    with FileLock(folder / "lock"):
        if not environment.exists():
            install_wheel(folder, environment)
    return environment / "bin" / "piecework"


def install_wheel(folder: Path, environment: Path) -> None:
    """Build the wheel in `folder` and install it into a new `environment`."""
    uv, python = [sys.executable, "-m", "uv", "--cache-dir", str(uv_cache(folder))], environment / "bin" / "python"
    subprocess.run([*uv, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)], check=True)
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(environment)], check=True)
    packages = [str(next(folder.glob("*.whl"))), f"flwr=={version('flwr')}"]
    subprocess.run(
        [*uv, "pip", "install", "--quiet", "--no-deps", "--compile-bytecode", "--python", str(python), *packages],
        check=True,
    )
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")


def uv_cache(folder: Path) -> Path:
    """uv's usual cache, or one in `folder` where the user's home cannot be written."""
    said = subprocess.run([sys.executable, "-m", "uv", "cache", "dir"], capture_output=True, text=True, check=True)
    usual = Path(said.stdout.strip())
    try:
        usual.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=usual):
            return usual
    except OSError:
        return folder / "uv"


@pytest.fixture(scope="module")
def two_nodes(session_folder: Path) -> Iterator[Any]:
    """A Ray cluster of two nodes on this machine, which the process has joined; the second shares no folder with the first."""
    from ray_helpers import two_raylets

    with two_raylets(session_folder / f"states-{os.getpid()}") as cluster:
        yield cluster
