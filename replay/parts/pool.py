"""Processes for work that takes long: of this machine, or of a Ray cluster (the extra `ray`)."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

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


def connect(address: str) -> Any:
    """Return the module `ray`, connected to the cluster at `address` until `ray.shutdown()`.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError:
        raise InputError("--ray: Ray is not installed; pip install 'forebay[ray]'") from None
    try:
        if address == "local":  # a cluster of this machine alone, which no other can reach
            ray.init(log_to_driver=False, include_dashboard=False, _node_ip_address="127.0.0.1")
        else:
            ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"--ray {address}: {str(error).splitlines()[0]}") from None
    return ray
