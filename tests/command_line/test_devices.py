"""Amounts of memory as text, and the figures a device measures of itself."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from piecework.commands import devices
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.profile import (
    UNLIMITED,
    MeasuredDevice,
    available_memory,
    cgroup_headroom,
    format_bytes,
    format_compared,
    measure_device,
    measured_budget,
    parse_bytes,
)
from piecework.federation.registry import ClientRegistry, Member
from piecework.training import memory_cap
from piecework.training.memory_cap import heap_limit, keep_heap_loose, keep_heap_tight, return_free_memory
from piecework.training.settings.shared import MemorySettings

# ---- bytes


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("64MB", 64_000_000),
        ("64 kB", 64_000),
        ("1.5GiB", 1_610_612_736),
        ("2GB", 2 * 10**9),
        ("3KiB", 3072),
        ("1MiB", 2**20),
        ("7B", 7),
        ("64.3MB", 64_300_000),
        (12, 12),
    ],
)
def test_parse_bytes(text: str | int, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["64", "MB", "64mb", "64 XB", "-1MB", "1e3MB", "", "1.MB"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="one of B, kB, MB, GB, KiB, MiB, GiB"):
        parse_bytes(text)


def test_format_bytes() -> None:
    amounts = [0, 999, 1000, 64_300_000, 64_000_000, 2_500_000_000, -1500]
    assert [format_bytes(amount) for amount in amounts] == [
        "0 B", "999 B", "1 kB", "64.3 MB", "64 MB", "2.5 GB", "-1.5 kB"
    ]  # fmt: skip
    assert parse_bytes(format_bytes(64_300_000)) == 64_300_000


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        ((9_014_480, 9_000_000), ["9.01 MB", "9 MB"]),
        ((9_000_000, 9_000_000), ["9 MB", "9 MB"]),
        ((9_000_001, 9_000_000, 8_000_000), ["9.000001 MB", "9 MB", "8 MB"]),
        ((2_000_000_001, 2_000_000_000), ["2.000000001 GB", "2 GB"]),
        ((0, 999_999, 1_000_000), ["0 B", "1000 kB", "1 MB"]),
        ((64_340_000, 64_260_000), ["64.34 MB", "64.26 MB"]),
        ((UNLIMITED, UNLIMITED + 1, 1000), ["unlimited", "unlimited", "1 kB"]),
    ],
)
def test_amounts_that_are_compared_show_that_they_differ(amounts, expected) -> None:
    assert format_compared(*amounts) == expected


# ---- a device measures itself


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def own(folder: Path, text: str) -> Path:
    path = folder / "own"
    path.write_text(text)
    return path


def test_cgroup_v2_takes_the_tightest_limit_of_group_and_parents(tmp_path: Path) -> None:
    root, path = tmp_path / "cgroup", own(tmp_path, "0::/slice/task\n")
    group(root / "slice" / "task", memory__max="max", memory__current=300)
    assert cgroup_headroom(root, path) is None
    group(root / "slice", memory__max=1000, memory__current=400)
    assert cgroup_headroom(root, path) == 600
    group(root / "slice" / "task", memory__max=500, memory__current=300)
    assert cgroup_headroom(root, path) == 200
    # Page cache that the kernel can drop is not taken.
    group(root / "slice" / "task", memory__stat="anon 150\ninactive_file 100")
    assert cgroup_headroom(root, path) == 300
    group(root / "slice" / "task", memory__current=900)
    assert cgroup_headroom(root, path) == 0


def test_cgroup_v1_and_containers(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    # The host's path leads nowhere inside a container: the root is its own group.
    path = own(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    files = {"memory__limit_in_bytes": 1000, "memory__usage_in_bytes": 700}
    group(root / "memory", **files, memory__stat="inactive_file 1\ntotal_inactive_file 50")
    assert cgroup_headroom(root, path) == 350
    # v1 writes "no limit" as a huge number.
    group(root / "memory", memory__limit_in_bytes=2**63 - 4096)
    assert cgroup_headroom(root, path) is None
    group(root / "memory", memory__limit_in_bytes=1000)
    # `..` is a group that cannot be seen, and must not lead out of the root.
    group(tmp_path / "memory", memory__limit_in_bytes=1, memory__usage_in_bytes=0)
    assert cgroup_headroom(root, own(tmp_path, "4:memory:/../../memory\n")) == 350


def test_available_memory_is_the_smaller_of_system_and_group(tmp_path: Path) -> None:
    root, path = tmp_path / "cgroup", own(tmp_path, "0::/\n")
    system = psutil.virtual_memory().available
    assert available_memory(tmp_path / "none", tmp_path / "no-file") == pytest.approx(system, rel=0.2)
    group(root, memory__max=5000, memory__current=1000)
    assert available_memory(root, path) == 4000
    group(root, memory__max=10**18)
    assert available_memory(root, path) == pytest.approx(system, rel=0.2)
    assert available_memory() > 0


def test_devices_measure_with_the_threads_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of all cores is not that of a client, which trains with training.torch-threads."""
    before, threads = torch.get_num_threads(), list[int]()

    def measure(folder: Path) -> MeasuredDevice:
        threads.append(torch.get_num_threads())
        return MeasuredDevice(1, 2.0, 3.0)

    monkeypatch.setattr(devices, "measure_device", measure)
    torch.set_num_threads(2)
    try:
        (row,) = devices.measure_here()
    finally:
        torch.set_num_threads(before)
    assert (threads, row["flops_per_second"]) == ([1], 2.0)


def test_measure_device(tmp_path: Path) -> None:
    import torch

    torch.zeros(1)  # not to time the import
    before = time.perf_counter()
    measured = measure_device(tmp_path)
    assert time.perf_counter() - before < 5
    assert all(value > 0 for value in dataclasses.asdict(measured).values())
    assert 1e7 < measured.flops_per_second < 1e14
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        measure_device(tmp_path / "missing")


@pytest.mark.parametrize(
    ("available", "message", "budget"),
    [
        (1000, 0, 900),
        (1000, 300, 900),  # three copies take the 900 exactly, before and after training
        (1000, 301, 0),  # 903 are needed and 900 are there
        (100, 0, 0),  # the reserve takes all
        (60, 20, 0),
    ],
)
def test_a_device_that_measures_itself_holds_copies_or_trains(available: int, message: int, budget: int) -> None:
    assert measured_budget(available, 100, message) == budget
    # the server assumes the same, from what the device reported last
    registry = ClientRegistry(load_fleet("demo"), 0, 1, MemorySettings(reserve=100))
    measured = {"memory-available": 1e9, "flops-per-second": 1e9, "disk-bandwidth": 1e7}
    registry.members[0] = Member(1, 0, "auto", "", measured=measured)
    assert registry.state(0, 1, 1, message).budget_bytes == 10**9 - 100
    registry.note_free_memory(0, available)
    assert registry.state(0, 1, 1, message).budget_bytes == budget


MiB = 2**20


@pytest.mark.parametrize(
    ("budget", "beside", "limit"),
    [
        (320 * MiB, 320 * MiB + 2**30, 10 * MiB),  # plenty: a 32nd of the budget, from 8 to 32 MiB
        (64 * MiB, 64 * MiB + 2**30, 8 * MiB),
        (2048 * MiB, 4096 * MiB, 32 * MiB),
        (UNLIMITED, 0, 32 * MiB),
        (320 * MiB, 320 * MiB + 2**30 - 1, 2 * MiB),
        (320 * MiB, 32 * MiB, 2 * MiB),
        (320 * MiB, 32 * MiB - 1, MiB // 2),  # scant
        (320 * MiB, -100 * MiB, MiB // 2),
    ],
)
def test_less_stays_in_the_heap_where_memory_is_short(budget: int, beside: int, limit: int) -> None:
    """`beside` is the memory that the device has besides the budget."""
    assert heap_limit(budget, budget + beside) == limit


@pytest.mark.parametrize(
    ("beside", "free", "trims"),
    [
        (64 * MiB + 2**30, 32 * MiB, 0),  # plenty: the next client finds them
        (64 * MiB + 2**30, 32 * MiB + 1, 1),
        (64 * MiB + 2**30 - 1, 1, 1),
    ],
)
def test_freed_memory_stays_for_the_next_client_where_it_is_plentiful(
    beside: int, free: int, trims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed = []
    monkeypatch.setattr(memory_cap.Heap, "spare", 0)
    monkeypatch.setattr(memory_cap, "free_in_heap", lambda: free)
    monkeypatch.setattr(memory_cap, "trim_heap", lambda: trimmed.append(1))
    keep_heap_tight(64 * MiB, 64 * MiB + beside)
    return_free_memory()
    assert len(trimmed) == trims
    keep_heap_loose()  # a server returns all when it has evaluated
    return_free_memory()
    assert len(trimmed) == trims + 1


FREE_A_BLOCK = """
from piecework.training.memory_cap import free_in_heap, keep_heap_loose

keep_heap_loose()  # blocks of this size are in the heap
block = bytearray(24 * 2**20)
before = free_in_heap()
del block
print(free_in_heap() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(memory_cap.libc_function("mallinfo2") is None, reason="glibc 2.33 and newer tell what is free")
def test_what_is_free_in_the_heap_is_known() -> None:
    # In a process of its own, whose heap no other test and no thread uses meanwhile.
    done = subprocess.run([sys.executable, "-c", FREE_A_BLOCK], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 24 * MiB
