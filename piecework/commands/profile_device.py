"""Measure this machine as a device of a fleet, over seconds, because a board slows down when it gets warm."""

import math
import os
import platform
import shutil
import statistics
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from piecework.device_profiles.disk import CACHE_CAN_BE_DROPPED, PROBE_FILE_BYTES, DiskSpeed, measure_disk
from piecework.device_profiles.profile import (
    available_memory,
    convolution_speeds,
    format_bytes,
    format_compared,
    usable_cpus,
)

DISK_BYTES, DISK_ACCESSES = 64_000_000, 64
STEADY = 0.9  # fraction of the first second's speed below which the device is reported to slow down


@dataclass(frozen=True)
class Profile:
    """The measurements: free bytes (`memory.reserve` of them stay free), FLOPs/s in the first second and sustained, disk."""

    name: str
    available: int
    reserve: int
    first_flops: float
    sustained_flops: float
    seconds: float
    threads: int
    disk: DiskSpeed
    disk_bytes: int
    cpus: int

    @property
    def memory(self) -> int:
        """Bytes that training may use."""
        return self.available - self.reserve

    @property
    def slows_down(self) -> bool:
        """Whether the sustained speed is clearly below that of the first second."""
        return self.sustained_flops < STEADY * self.first_flops

    def values(self) -> dict[str, Any]:
        """Return the device with the keys of a fleet file."""
        return {
            "name": self.name,
            "memory": self.memory,
            "flops": _round_figure(self.sustained_flops),
            "disk-bandwidth": _round_figure(self.disk.read),
            "disk-write-bandwidth": _round_figure(self.disk.write),
            "disk-latency": _round_figure(self.disk.latency),
            "disk-write-latency": _round_figure(self.disk.write_latency),
            "cpus": self.cpus,
        }


def profile_device(name: str, seconds: float, folder: Path, threads: int, reserve: int) -> Profile:
    """Measure for about `seconds` plus the time for the disk, with a temporary probe file in `folder`.

    Raises ValueError if a figure would mean nothing, OSError if `folder` cannot be used.
    """
    if not name.strip() or not name.isprintable():
        raise ValueError(f"--name {name!r}: a device needs a name")
    if not seconds >= 1 or math.isinf(seconds):
        raise ValueError(f"--seconds {seconds:g}: must be at least 1, or only warming up is measured")
    if not folder.is_dir():
        raise ValueError(f"--folder {folder}: no such folder; give one on the disk where the node's state-dir will be")
    free = shutil.disk_usage(folder).free
    size = min(DISK_BYTES, free // 2)
    if size < PROBE_FILE_BYTES:
        raise ValueError(f"--folder {folder}: {format_bytes(free)} are free there, too few for a probe of the disk")

    import torch  # a client that measures its free memory has loaded torch too

    torch.set_num_threads(threads)
    available = available_memory()
    if available <= reserve:
        free_now, kept = format_compared(available, reserve)
        raise ValueError(
            f"{free_now} of memory are available and memory.reserve = {kept} are to stay free: "
            "nothing is left to train with; end other programs or lower the reserve (--set memory.reserve=...)"
        )
    try:
        disk = measure_disk(folder, size, DISK_ACCESSES)
    except OSError as error:
        raise OSError(f"--folder {folder}: {error}; give a folder that can be written") from None
    first, sustained = steady_speed(convolution_speeds(seconds), seconds)
    return Profile(name, available, reserve, first, sustained, seconds, threads, disk, size, usable_cpus())


def steady_speed(speeds: list[tuple[float, float]], seconds: float) -> tuple[float, float]:
    """Return the median speeds of what began in the first second and in the last half of `seconds`.

    If none began in the last half, the last repetition stands for it: the device is that slow.
    """
    first = [speed for began, speed in speeds if began < min(1.0, seconds / 2)]
    last = [speed for began, speed in speeds if began >= seconds / 2] or [speeds[-1][1]]
    return statistics.median(first), statistics.median(last)


def toml_text(profile: Profile) -> str:
    """Return a `[[device]]` table with how it was measured; a file of such tables is a pool."""
    import torch

    wheel = f"CUDA {torch.version.cuda} wheel" if torch.version.cuda else "CPU wheel"
    total = psutil.virtual_memory().total
    cores = f"{os.cpu_count()} cores, {profile.cpus} of them usable"
    ratio = profile.sustained_flops / profile.first_flops
    dropped = "the system's cache was dropped before" if CACHE_CAN_BE_DROPPED else "from the system's cache"
    disk = profile.disk
    lines = [
        f"Measured by `piecework profile` on {datetime.now().astimezone():%Y-%m-%d %H:%M %z}.",
        f"{platform.system()} {platform.release()}, {platform.machine()}, {cores}, {format_bytes(total)} of memory in all.",
        f"python {platform.python_version()}, torch {torch.__version__} ({wheel}), flwr {version('flwr')}.",
        f"memory: {format_bytes(profile.available)} available with torch loaded, less a reserve of "
        f"{format_bytes(profile.reserve)}.",
        f"flops: a small convolution, forward and backward, {profile.threads} torch thread(s), median of the last half of "
        f"{profile.seconds:g} s;",
        f"  in the first second {profile.first_flops:.3g}, sustained {ratio:.0%} of it.",
        f"disk: {format_bytes(profile.disk_bytes)} written and synced at {format_bytes(round(disk.write))}/s, read at "
        f"{format_bytes(round(disk.read))}/s ({dropped}).",
        "bandwidth (bytes/s of the network) is not measured; without it the network takes no simulated time.",
    ]
    comments = "".join(f"# {line}\n" for line in lines)
    return f"{comments}\n{tomli_w.dumps({'device': [profile.values()]}).strip()}\n"


def write_new(path: Path, text: str) -> None:
    """Write a file that must not exist yet, as a whole. Raises ValueError or OSError."""
    check_new(path)
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(text, encoding="utf-8")
    staging.rename(path)


def check_new(path: Path) -> None:
    """Reject an existing file or a missing folder before anything is measured."""
    if path.exists():
        raise ValueError(f"--out {path} is there already: choose another file, or remove it first")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.absolute().parent}")


def _round_figure(figure: float) -> float:
    """Round to three digits; more would not be justified by the measurement."""
    return float(f"{figure:.3g}")
