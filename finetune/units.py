"""Bytes and durations as a person would say them, and numbers in equal parts."""

MIB = 2**20
GIB = 2**30


def largest_part(number: int, most: int) -> int:
    """Of as few parts as there can be with none above ``most``, and as equal: 10 in parts of at most 7 are 5 and 5."""
    return -(-number // max(1, -(-number // most)))


def spoken(seconds: float) -> str:
    """Two units at most: ``4.2 s``, ``43 min``, ``2 h 10 min``, ``3 d 4 h``."""
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if 0 < seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24:,} d {hours % 24} h"


def size_text(size_bytes: float) -> str:
    """Bytes with three digits or so, in MiB below one GiB: ``65.1 MiB``, ``257 MiB``, ``16.1 GiB``."""
    number, unit = (size_bytes / MIB, "MiB") if size_bytes < GIB else (size_bytes / GIB, "GiB")
    return f"{number:.{0 if number >= 100 else 1}f} {unit}"
