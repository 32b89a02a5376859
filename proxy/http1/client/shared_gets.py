"""Share one GET among callers that ask a server the same question at the same time."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Final

SHARED_S: Final = 0.05  # the callers' timers differ by less
Answer = tuple[int, bytes]
"""Status and body."""


class SharedGets:
    """Answers that several callers share, each until `SHARED_S` after it came."""

    def __init__(self) -> None:
        self._asked: dict[Hashable, asyncio.Task[Answer]] = {}

    async def get(self, key: Hashable, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the answer to a question, or raise what `ask` raised.

        A caller that is cancelled leaves the question to the others.

        Args:
            key: equal for equal questions.
            ask: asks it; its time is bounded.
        """
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(ask())
            task.add_done_callback(lambda done: self._answered(key, done))
        return await asyncio.shield(task)

    def _answered(self, key: Hashable, task: asyncio.Task[Answer]) -> None:
        if not task.cancelled():
            task.exception()  # perhaps no caller is left to take it
        asyncio.get_running_loop().call_later(SHARED_S, self._asked.pop, key, None)

    async def close(self) -> None:
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
