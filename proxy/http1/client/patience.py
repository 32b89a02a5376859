"""A time limit that does not count the time for which the proxy itself stood still."""

import asyncio

SLICES = 4  # slices of a limit; an event loop that is late by half a slice has stood still


def ended_by_limit(task: asyncio.Task[object], cancelling: int, kind: type | None) -> bool:
    """Take back a limit's cancellation of a task. True if it alone ended the block.

    Args:
        cancelling: the task's count of cancellations before the block.
        kind: the exception that ended the block.
    """
    return task.uncancel() <= cancelling and kind is asyncio.CancelledError


class Patience:
    """Ends a `with` block by TimeoutError after `seconds`.

    `asyncio.timeout` does the same, but while the event loop is late, an answer may have come that
    could not be read yet. So a slice of the time in which the loop was late does not count, up to
    as many slices as the limit has: a block ends even where the loop is always late.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._slice_s = seconds / SLICES
        self._left = self._late = SLICES
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._wait()

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        self._timer.cancel()
        if self._expired and ended_by_limit(self._task, self._cancelling, kind):
            raise TimeoutError from error

    def _wait(self) -> None:
        self._due = self._loop.time() + self._slice_s
        self._timer = self._loop.call_at(self._due, self._over)

    def _over(self) -> None:
        """End a slice."""
        if self._late and self._loop.time() - self._due > self._slice_s / 2:
            self._late -= 1
        else:
            self._left -= 1
        if self._left:
            self._wait()
        else:
            self._expired = True
            self._task.cancel()
