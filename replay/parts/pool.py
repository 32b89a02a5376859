"""Processes for work that takes long, or one line that says why this machine has no pool."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from forebay.traces.ground.errors import InputError


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool (InputError: /dev/shm is missing or cannot be written)."""
    try:
        return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    except OSError as error:
        reason = f"no pool of processes without a writable /dev/shm ({error.strerror})"
        raise InputError(f"{reason}; give --jobs 1") from None
