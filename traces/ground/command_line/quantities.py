"""Parse durations and sizes such as `2s`, `300ms` and `16MiB`."""

import re
from typing import Any

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def seconds(value: Any) -> Any:
    """Parse `300ms`, `2s`, `1m`, `1h` or a number of seconds (ValueError: another text)."""
    return _quantity(value, _SECONDS, "a duration such as 2s or 300ms")


def size_bytes(value: Any) -> Any:
    """Parse `16KiB`, `16MiB`, `1GiB`, `10MB` or a number of bytes (ValueError: another text)."""
    size = _quantity(value, _BYTES, "a size such as 16MiB")
    return int(size) if isinstance(size, float) and size.is_integer() else size


def seconds_text(value: float) -> str:
    """Format seconds so that `seconds` reads them again, such as 300ms or 2s."""
    return f"{value:.12g}s" if value >= 1 or not value else f"{value * 1e3:.12g}ms"


def bytes_text(value: int) -> str:
    """Format bytes so that `size_bytes` reads them again: in units such as 16MiB, or plain."""
    for unit in ("GiB", "MiB", "KiB"):
        if value and value % _BYTES[unit.lower()] == 0:
            return f"{value // _BYTES[unit.lower()]}{unit}"
    return str(value)


def _quantity(value: Any, units: dict[str, float] | dict[str, int], right: str) -> Any:
    if not isinstance(value, str):
        return value
    match = _QUANTITY.fullmatch(value)
    if match and match.group(2).lower() in units:
        return float(match.group(1)) * units[match.group(2).lower()]
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"give {right}") from None


def short_time(seconds: float | None) -> str:
    """Format a latency in ms or s, or None as `-`."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.0995 else f"{seconds:.2f} s"


def long_time(seconds: float) -> str:
    """Format an age or a span in whole seconds, minutes or hours."""
    if seconds < 100.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 6_000.0 else f"{seconds / 3_600.0:.0f} h"
