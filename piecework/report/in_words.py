"""Figures in words, from their own data: what a reader who does not see them is told."""

from html import unescape
from typing import Any

from piecework.device_profiles.profile import format_bytes, format_percent

MANY = 8  # traces of which each is told


def in_words(figure: Any, heading: str) -> str:
    """Return what a figure of plotly shows: each curve's first and last value, the extremes of bars and marks."""
    told = []
    for trace in list(figure.data)[:MANY]:
        x, y = (figure.layout[f"{axis}axis{(trace[f'{axis}axis'] or axis)[1:]}"] for axis in "xy")
        told.append(heatmap(trace) if trace.type == "heatmap" else values(trace, x, y))
    if len(figure.data) > MANY:
        told.append(f"and {len(figure.data) - MANY} more")
    return f"{heading}: {'; '.join(filter(None, told)) or 'no values'}."


def values(trace: Any, across: Any, up: Any) -> str:
    """Return a curve, bars or marks on these axes: `test accuracy rises from 31.0% (round 1) to 97.2% (round 20)`."""
    seen = [(x, float(y)) for x, y in zip(trace.x or (), trace.y or (), strict=True) if y is not None]
    if trace.hoverinfo == "skip" or not seen:
        return ""
    name, at = (
        unescape(str(trace.name or up.title.text or "values")),
        f"{across.title.text} " if across.title.text else "",
    )
    (first, start), (last, end) = seen[0], seen[-1]
    if len(seen) == 1:
        return f"{name} {amount(start, up)} ({at}{amount(first, across)})"
    if trace.type == "bar" or trace.mode == "markers":
        low, high = amount(min(y for _, y in seen), up), amount(max(y for _, y in seen), up)
        return f"{name} {low}" if low == high else f"{name} {low} to {high}"
    way = "rises" if end > start else "falls" if end < start else "goes"
    ends = [f"{amount(y, up)} ({at}{amount(x, across)})" for x, y in ((first, start), (last, end))]
    return f"{name} {way} from {ends[0]} to {ends[1]}"


def heatmap(trace: Any) -> str:
    """Return how many cells there are, and their extremes."""
    found = [float(value) for row in trace.z for value in row if value is not None]
    if not found:
        return ""
    return f"{len(trace.z)} rows of {len(trace.x)} cells, from {min(found):.3g} to {max(found):.3g}"


def amount(value: Any, axis: Any) -> str:
    """Format a value as its axis does: a share, bytes, or four digits; what is no number as it is."""
    if isinstance(value, str):
        return unescape(value)
    if "%" in str(axis.tickformat or ""):
        return format_percent(value, 1)
    if axis.ticksuffix == "B":
        return format_bytes(round(value))
    return str(value) if isinstance(value, int) else f"{value:.4g}"
