"""The emulated clock: how long a client's task would take on its device, and a round on its slowest client."""

from collections.abc import Iterable

from device_profiles.profile import DeviceState


def simulated_seconds(state: DeviceState, flops: float, bytes_down: int, bytes_up: int, disk_bytes: int = 0) -> float:
    """Seconds for receiving `bytes_down`, computing `flops` (2 per multiply-accumulate), moving `disk_bytes` to and
    from the disk and sending `bytes_up`, one after another: a small board overlaps little; the sum is an upper bound.

    Raises ValueError for a negative amount.
    """
    if min(flops, bytes_down, bytes_up, disk_bytes) < 0:
        raise ValueError(
            f"amounts of work must not be negative: flops {flops}, down {bytes_down}, up {bytes_up}, disk {disk_bytes}"
        )
    network = (bytes_down + bytes_up) / state.bandwidth
    return network + flops / state.flops_per_second + disk_bytes / state.disk_bandwidth


def round_seconds(client_seconds: Iterable[float]) -> float:
    """Seconds of a round in which clients work side by side: those of the slowest; 0 without clients."""
    return max(client_seconds, default=0.0)
