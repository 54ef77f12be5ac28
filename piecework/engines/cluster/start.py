"""Start a Ray of our own, whatever else runs on this machine, or join the cluster that the user names."""

import logging
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray

from piecework.app_folder import PACKAGE, SHIPPED
from piecework.engines.guardian import MARKS
from piecework.engines.processes import EngineError, guard_folder
from piecework.planning.now import doing

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
MARK = MARKS[1]
CODE_OF_OTHERS = ("__pycache__", SHIPPED.name)


@contextmanager
def own_ray(cpus: int, gpus: int) -> Iterator[None]:
    """Start a Ray that only this process knows, with a folder of its own, and stop it at the end.

    With an address Ray would join whatever cluster runs here, and write its own where others find it.
    """
    short = os.environ.get("RAY_TMPDIR") or "/tmp"  # noqa: S108 (sockets need short paths; the folder in it is private)
    try:
        folder = tempfile.mkdtemp(prefix="ray-", dir=short)
    except OSError as error:
        raise EngineError(f"Ray cannot keep its files in {short}: {error}; RAY_TMPDIR names another folder") from None
    doing("Ray starts")
    try:
        with ExitStack() as stack:
            stack.enter_context(guard_folder(folder))  # Ray's agents outlive a killed driver by a minute
            options = {"num_cpus": cpus, "num_gpus": gpus, "include_dashboard": False, "_temp_dir": folder}
            os.environ[MARK] = folder
            try:
                stack.enter_context(started(address="local", **options))
            except (RuntimeError, ValueError, OSError) as error:
                raise EngineError(f"Ray did not start: {' '.join(str(error).split())}") from error
            finally:
                del os.environ[MARK]
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Join a cluster of which this machine is a node; this program's code goes along. Raises EngineError."""
    with ExitStack() as stack:
        code = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="piecework-code-")))
        collect_code(code)
        doing("joining the Ray cluster at %s", address)
        try:
            stack.enter_context(started(address=address, runtime_env={"working_dir": str(code)}))
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineError(
                f"the Ray cluster at {address} cannot be joined: {' '.join(str(error).split())}. This machine must be a node "
                "of it (ray start --address=...), with the same Python and Ray"
            ) from None
        yield


@contextmanager
def started(**options: Any) -> Iterator[None]:
    """Start or join a Ray by `ray.init` with these options, quietly, and leave it at the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(**QUIET, **options)
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray has its own, which ends the run without a word
        yield
    finally:
        ray.shutdown()


def collect_code(folder: Path) -> None:
    """Copy this package to a folder, from which all nodes of a cluster import it, whatever they have installed."""
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns(*CODE_OF_OTHERS))


def require_same(node: str, theirs: dict[str, str]) -> None:
    """Raise EngineError, with both named, if a node's Python or torch is not this machine's: results would differ."""
    for name, version in software().items():
        if theirs[name] != version:
            raise EngineError(
                f"node {node} has {name} {theirs[name]}, this machine {name} {version}: install the same on both"
            )


def software() -> dict[str, str]:
    """Return the versions on which results depend, by name."""
    import torch

    return {"Python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
