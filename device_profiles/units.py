"""Amounts as people read them: times, FLOPs, counts, shares. Bytes and percentages with decimals are in profile.py."""

ROUNDING = 1e-9  # of sums of shares
SCALES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def format_seconds(seconds: float) -> str:
    """Format seconds as `0.47 s`, `9.4 s`, `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.2g} s" if 0 < seconds < 0.95 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"


def format_share(fraction: float) -> str:
    """Format a share in whole percents: `0%` is nothing and `100%` all; what is nearly one of them is `<1%` or `>99%`."""
    said = f"{fraction:.0%}"
    if said == "100%" and fraction < 1 - ROUNDING:
        return ">99%"
    return "<1%" if said == "0%" and fraction > ROUNDING else said


def format_count(amount: float) -> str:
    """Format a count with three digits: `950`, `520 k`, `11.2 M`."""
    unit, size = next(((unit, size) for unit, size in SCALES if amount >= size), ("", 1.0))
    return f"{amount / size:.3g} {unit}".strip()


def format_flops(amount: float, unit: str = "FLOP") -> str:
    """Format FLOPs, or another unit of operations, with three digits: `53 MFLOP`, `2.57 GMAC`."""
    number, _, scale = format_count(amount).partition(" ")
    return f"{number} {scale}{unit}"
