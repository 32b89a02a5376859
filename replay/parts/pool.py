"""Processes for work that takes long, or one line that says why this machine has no pool."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from forebay.traces.ground.errors import InputError


def process_pool(jobs: int, start: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """Return a pool (InputError: /dev/shm is missing or cannot be written).

    Args:
        start: called first in each process.
    """
    try:
        return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=start)
    except OSError as error:
        reason = f"no pool of processes without a writable /dev/shm ({error.strerror})"
        raise InputError(f"{reason}; give --jobs 1") from None
