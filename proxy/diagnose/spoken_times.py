"""Write times for people: `35 ms`, `1.20 s`, `12 min`."""


def short_time(seconds: float | None) -> str:
    """Return a latency; `-` where there is none."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.0995 else f"{seconds:.2f} s"


def long_time(seconds: float) -> str:
    """Return an age or a span in whole seconds, minutes or hours."""
    if seconds < 100.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 6_000.0 else f"{seconds / 3_600.0:.0f} h"
