"""Run jobs in parallel processes, or directly in this one."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import TypeVar

from forebay.replay.parts.pool import process_pool

T = TypeVar("T")


class JobRunner:
    """Runs jobs in a pool, or in this process without a pool. The results are equal."""

    def __init__(self, pool: ProcessPoolExecutor | None) -> None:
        self._pool = pool

    def start(self, work: Callable[..., T], *job: object) -> "Future[T]":
        if self._pool is not None:
            return self._pool.submit(work, *job)
        done: Future[T] = Future()
        done.set_result(work(*job))
        return done

    def all(self, work: Callable[..., T], jobs: Sequence[tuple[object, ...]]) -> list[T]:
        return [future.result() for future in [self.start(work, *job) for job in jobs]]


@contextmanager
def workers(jobs: int, needed: str) -> Iterator[JobRunner]:
    """Open `jobs` processes, which import the module `needed` while the caller does the same."""
    if jobs <= 1:
        yield JobRunner(None)
        return
    with process_pool(jobs) as pool:
        for _ in range(jobs):
            pool.submit(import_module, needed).add_done_callback(Future.exception)
        try:
            yield JobRunner(pool)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
