"""Keep requests while no backend of their model is up: one restarts, or the first one starts."""

import asyncio
from collections.abc import Callable

from forebay.proxy.backends import Backends


class HeldRequests:
    """Requests that wait for a backend to come up, in no queue.

    Args:
        most: returns how many may be kept; one more is not.

    Attributes:
        count: requests that are kept now.
    """

    def __init__(self, backends: Backends, most: Callable[[], int]) -> None:
        self.count = 0
        self._backends = backends
        self._most = most
        self._refusal: Callable[[], Exception] | None = None

    async def until_up(self, model: str, until: float) -> bool:
        """Wait until some backend of the model is up.

        Returns whether there was one to wait for and it came in time.

        Args:
            model: as `Request.model`.
            until: on the clock of the event loop.
        """
        if self._backends.any_up(model) or self.count >= self._most():
            return False
        self.count += 1
        try:
            async with asyncio.timeout_at(until):
                while not self._backends.any_up(model):
                    if self._refusal is not None:
                        raise self._refusal()
                    await self._backends.came_up.wait()
        except TimeoutError:
            return False
        finally:
            self.count -= 1
        return True

    def end_all(self, refusal: Callable[[], Exception]) -> None:
        """Fail all requests that are kept, and those that would be, with `refusal()`."""
        self._refusal = refusal
        self._backends.came_up.set()
