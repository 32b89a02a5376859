"""Measure the speed of this machine, by which runs of different hours can be read."""

import time


def reference_ms() -> float:
    """Time a fixed loop of plain Python."""
    started = time.process_time()
    sum(i * i for i in range(1_000_000))
    return (time.process_time() - started) * 1e3
