"""Devices: the figures of a board, what a client has of them in one round, and measurements of the present machine.

Units: memory in bytes, speed in FLOPs/s (a multiply-accumulate is 2 FLOPs), network and disk in bytes/s.
"""

import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from piecework.device_profiles.disk import PROBE_FILE_BYTES, measure_disk

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")

# The value of an unlimited budget, in bytes: an integer that survives JSON, TOML, 64-bit messages and floats. No device has as
# much as ENDLESS, and a fraction of an unlimited budget, as given to a client that crashed, is still larger.
UNLIMITED, ENDLESS = 2**60, 2**56
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MESSAGE_COPIES = 3  # at most, in the memory of a device that receives or sends a message
PROBE_SECONDS = 0.1


def parse_bytes(text: str | int) -> int:
    """Return the bytes of "64MB" or "1.5 GiB"; an integer is already in bytes. Raises ValueError, which names the units."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text) if isinstance(text, str) else None
    if match is None or match[2] not in UNITS:
        raise ValueError(f'not an amount of memory; write a number and one of {", ".join(UNITS)}, as in "64MB"')
    amount = float(match[1]) * UNITS[match[2]]
    if not math.isfinite(amount):
        raise ValueError(f"more bytes than a number of 64 bits can be, at most {UNLIMITED}")
    return round(amount)


def usable_cpus() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_unlimited(amount: int) -> bool:
    """Return whether a budget of this many bytes sets no limit."""
    return amount >= ENDLESS


def is_limit(amount: int) -> bool:
    """Return whether a budget of this many bytes limits a client: it is known and not unlimited."""
    return 0 < amount < ENDLESS


def parse_memory(text: str | int) -> int:
    """Return the bytes of "64MB", or UNLIMITED for "unlimited". Raises ValueError, which names both forms."""
    if text == "unlimited":
        return UNLIMITED
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f'{error}, or "unlimited"') from None


def format_bytes(amount: int, decimals: int = 1) -> str:
    """Format bytes in powers of ten with at most `decimals` decimals: 64300000 is "64.3 MB". May return "unlimited"."""
    if is_unlimited(amount):
        return "unlimited"
    unit = next((unit for unit in ("GB", "MB", "kB") if abs(amount) >= UNITS[unit]), "B")
    return f"{amount / UNITS[unit]:.{decimals}f}".rstrip("0").removesuffix(".") + f" {unit}"


def format_compared(*amounts: int) -> list[str]:
    """Format bytes that a reader compares, such as needed and allowed, with enough decimals that unequal ones differ.

    9014480 and 9000000 are "9.01 MB" and "9 MB".
    """
    exact = 9  # decimals that show every byte of a GB
    different = len({UNLIMITED if is_unlimited(amount) else amount for amount in amounts})
    texts = ([format_bytes(amount, decimals) for amount in amounts] for decimals in range(1, exact + 1))
    return next(found for found in texts if len(set(found)) == different)


def format_percent(fraction: float | None, digits: int = 2) -> str:
    """Format a fraction; `-` for None. Only 1 itself is shown as 100 %: a peak just over its budget must not seem to fit."""
    if fraction is None:
        return "-"
    step = 10**-digits
    near = (
        100 * fraction
        if fraction == 1 or abs(100 * fraction - 100) >= step
        else 100 + (step if fraction > 1 else -step)
    )
    return f"{near:.{digits}f}%"


@dataclass(frozen=True)
class DeviceProfile:
    """A device as a fleet describes it, before the degradation of a round.

    Exactly one of `memory_bytes` and `memory_ratio` is set. The ratio refers to the bytes of one reference step (the full
    model's FedAvg step under the run's memory model). `bandwidth` (bytes/s) applies to each direction of the network; None =
    the network is not modelled and takes no time. `disk_latency` is in seconds per access. A disk without
    `disk_write_bandwidth` or `disk_write_latency` writes as fast as it reads. `cpus` is the number of cores of the device's
    container; None = not specified, and nothing else reads it. `keep` is the model fraction that scaling methods assign to the
    device; None = the largest that fits.

    Raises ValueError if both or neither memory figure is given.
    """

    name: str
    memory_bytes: int | None
    memory_ratio: float | None
    flops_per_second: float
    bandwidth: float | None
    disk_bandwidth: float
    disk_latency: float = 0.0
    cpus: float | None = None
    keep: float | None = None
    disk_write_bandwidth: float | None = None
    disk_write_latency: float | None = None

    def __post_init__(self) -> None:
        if (self.memory_bytes is None) == (self.memory_ratio is None):
            raise ValueError(f"device {self.name!r}: give exactly one of memory_bytes and memory_ratio")

    def budget(self, reference_bytes: int, loss: float = 0.0) -> int:
        """Return the memory in bytes after losing the fraction `loss` (0 to 1); a ratio refers to `reference_bytes`.

        Unlimited memory loses nothing. Raises ValueError for a ratio of a reference that is not positive, because the budget
        would be empty.
        """
        if self.memory_bytes is not None:
            return UNLIMITED if is_unlimited(self.memory_bytes) else int(self.memory_bytes * (1 - loss))
        assert self.memory_ratio is not None
        if reference_bytes <= 0:
            raise ValueError(
                f"device {self.name!r} has {self.memory_ratio:g} of a reference step's memory, "
                f"but the reference step is {reference_bytes} bytes, which must be positive"
            )
        return min(UNLIMITED, int(self.memory_ratio * reference_bytes * (1 - loss)))


@dataclass(frozen=True)
class DeviceState:
    """What one client has in one round.

    The units are bytes, FLOPs/s, bytes/s of network (per direction; infinite if not modelled) and of disk, and seconds per disk
    access besides its bytes. `keep` is that of its fleet. `tolerance` is the excess over the budget that the run allows, as a
    fraction of it; infinite if nothing is checked.
    """

    device: str
    budget_bytes: int
    flops_per_second: float
    bandwidth: float
    disk_bandwidth: float
    disk_latency: float = 0.0
    keep: float | None = None
    tolerance: float = 0.0
    disk_write_bandwidth: float | None = None
    disk_write_latency: float | None = None

    @property
    def write_bandwidth(self) -> float:
        """The bytes/s that the disk writes: as many as it reads, unless the fleet says otherwise."""
        return self.disk_write_bandwidth or self.disk_bandwidth

    @property
    def write_latency(self) -> float:
        """The seconds of an access that writes: those of one that reads, unless the fleet says otherwise."""
        return self.disk_latency if self.disk_write_latency is None else self.disk_write_latency

    @property
    def allowed_bytes(self) -> int:
        """The bytes that training may take."""
        return allowance(self.budget_bytes, self.tolerance)


def allowance(budget: int, tolerance: float) -> int:
    """Return a budget (bytes) plus the fraction `tolerance` of it; the largest integer if that is infinite."""
    return sys.maxsize if tolerance == math.inf else int(budget * (1 + tolerance))


def budget_of(allowed: int, tolerance: float) -> int:
    """Return the budget (bytes) that `allowance` raised to `allowed`, to a byte; 0, no surplus, if nothing is checked."""
    if tolerance == math.inf:
        return 0
    return math.ceil(allowed / (1 + tolerance)) if tolerance else allowed


def measured_budget(available: int, reserve: int, message_bytes: int) -> int:
    """Return the training budget of a device that has `available` bytes and keeps `reserve` of them free, in bytes.

    Flower's copies of a message exist before and after training, not during it. So a device needs memory for whichever takes
    more, not for both. If it has too little for the copies, the budget is 0.
    """
    budget = max(0, available - reserve)
    return budget if MESSAGE_COPIES * message_bytes <= budget else 0


@dataclass(frozen=True)
class MeasuredDevice:
    """The figures that a device measured itself (`device = "auto"`): bytes, FLOPs/s, bytes/s."""

    memory_available_bytes: int
    flops_per_second: float
    disk_bandwidth: float


def measure_device(directory: str | Path) -> MeasuredDevice:
    """Measure this machine in a few hundred milliseconds, with a temporary probe file in `directory`.

    The speed is the best repetition of training one small convolution with torch's present number of threads, so set the
    threads first. Raises OSError if `directory` is missing, not writable or full.
    """
    # Memory is measured first, because the probes themselves take some.
    memory = available_memory()
    fastest = max(speed for _, speed in convolution_speeds(PROBE_SECONDS))
    return MeasuredDevice(memory, fastest, measure_disk(Path(directory), PROBE_FILE_BYTES).read)


def available_memory(cgroup_root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> int:
    """Return the bytes this process can still take: what the system has available, or its control group if that is less."""
    system = int(psutil.virtual_memory().available)
    group = cgroup_headroom(cgroup_root, own_cgroup)
    return system if group is None else min(system, group)


def cgroup_headroom(cgroup_root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> int | None:
    """Return the bytes left under the tightest memory limit of this process's control groups (v1 or v2); None without a limit.

    A limit also applies to all groups below it, so the process's own group and all its parents are read. Inside a container the
    path in `own_cgroup` may be the host's and not exist; the container's own group is then the root.
    """
    try:
        lines = own_cgroup.read_text().splitlines()
    except OSError:
        lines = []
    paths = {"memory": "", "": ""}  # of the v1 memory controller and of the v2 group
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in paths:
                paths[controller] = path
    found = []
    for root, path, names in (
        (cgroup_root, paths[""], ("memory.max", "memory.current", "inactive_file")),
        (
            cgroup_root / "memory",
            paths["memory"],
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ):
        # `..` is a group outside this namespace, which cannot be seen from here.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            left = _group_headroom(root.joinpath(*parts[:depth]), *names)
            if left is not None:
                found.append(left)
    return min(found, default=None)


def _group_headroom(group: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    limit, usage = _read_int(group / limit_name), _read_int(group / usage_name)
    if limit is None or usage is None:
        return None
    # Usage includes the page cache, also of our own feature files; the kernel drops its cold part before it kills.
    cache = 0
    try:
        for line in (group / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == reclaimable:
                cache = int(value)
    except (OSError, ValueError):
        pass
    return max(0, limit - max(0, usage - cache))


def _read_int(path: Path) -> int | None:
    """Return the number in a file; None without a file or without a limit: `max` in v2, near 2^63 in v1."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number < 2**62 else None


def convolution_speeds(seconds: float) -> list[tuple[float, float]]:
    """Measure a 3x3 convolution, 32 -> 32 channels, 32x32, batch 8, forward and backward, repeatedly for `seconds`.

    Returns for each repetition its start, in seconds after the first, and its speed in FLOPs/s with torch's present number of
    threads.
    """
    import torch  # imported here so that the launcher can read fleets without torch

    shapes = ((8, 32, 32, 32), (32, 32, 3, 3))
    images, kernel = (torch.ones(s).to(memory_format=torch.channels_last).requires_grad_() for s in shapes)
    flops = 3 * 2 * images.numel() * 32 * 3 * 3  # each of the two gradients takes as many as the forward pass

    def step() -> None:
        torch.autograd.grad(torch.nn.functional.conv2d(images, kernel, padding=1).sum(), (images, kernel))

    step()  # the first call prepares the kernels
    found: list[tuple[float, float]] = []
    start = time.perf_counter()
    while not found or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        step()
        found.append((before - start, flops / (time.perf_counter() - before)))
    return found
