"""Where the tests find data: env PIECEWORK_DATA, else the folder beside the checkout, if it is there."""

import hashlib
import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from filelock import FileLock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: pytest's workers share the cores
import torch

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


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Converted data sets of a test session do not touch the user's cache."""
    os.environ["PIECEWORK_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test session, which its workers share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def traced_once(session_folder: Path) -> Iterator[None]:
    """Trace the cost of each part and examine each unit once a session, although many runs need those of the same model.

    The key is the pickled call. Local functions enter it with their closures, local classes by identity; only calls without
    local classes are shared among workers. Tests of the tracing itself call `piece_cost` directly and are not affected.
    """
    from piecework.models import layer_statistics
    from piecework.planning import costs
    from piecework.strategies.cascade import fedprophet_evaluation

    known: dict[bytes, Any] = {}
    classes: dict[int, type] = {}  # kept, so that no other class gets their id
    shared = session_folder / "costs"
    shared.mkdir(exist_ok=True)

    class Key(pickle.Pickler):
        portable = True

        def persistent_id(self, found: object) -> object:
            if isinstance(found, FunctionType) and "<" in found.__qualname__:
                closure = tuple(cell.cell_contents for cell in found.__closure__ or ())
                return found.__module__, found.__qualname__, found.__code__.co_firstlineno, found.__defaults__, closure
            if isinstance(found, type) and "<" in found.__qualname__:
                classes[id(found)] = found
                self.portable = False
                return id(found)
            return None

    def once(trace: Callable[..., Any]) -> Callable[..., Any]:
        def cost(*arguments: Any, **options: Any) -> Any:
            pickled = io.BytesIO()
            pickler = Key(pickled)
            pickler.dump((trace.__qualname__, arguments, options, torch.get_num_threads()))
            key = pickled.getvalue()
            if key in known:
                return known[key]
            path = shared / hashlib.sha256(key).hexdigest()
            if pickler.portable and path.exists():
                known[key] = pickle.loads(path.read_bytes())
            else:
                known[key] = trace(*arguments, **options)
                if pickler.portable:
                    written = path.with_suffix(f".{os.getpid()}")
                    written.write_bytes(pickle.dumps(known[key]))
                    written.replace(path)
            return known[key]

        return cost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "piece_cost", once(costs.piece_cost))
        patch.setattr(costs, "stream_cost", once(costs.stream_cost))
        for name in ("validation_cost", "query_cost"):
            patch.setattr(fedprophet_evaluation, name, once(getattr(fedprophet_evaluation, name)))
        patch.setattr(layer_statistics, "_examine", once(layer_statistics._examine))
        yield


@pytest.fixture(scope="session", autouse=True)
def untrimmed() -> Iterator[None]:
    """Do not trim the heap, which is large and full of holes here: that took a tenth of the suite's time.

    What a client or the server gives back is measured in processes of their own.
    """
    from piecework.training import memory_cap

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_cap, "trim_heap", lambda: None)
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
