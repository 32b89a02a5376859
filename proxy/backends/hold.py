"""Keep requests while no backend of their model is up, because it restarts or has yet to start."""

import asyncio
from collections import Counter
from collections.abc import Callable

from forebay.proxy.backends.served_models import ServedModels
from forebay.proxy.core.model import MAJORITY

REFUSED_S = 0.25  # until a backend that refused a connection is tried again


class HeldRequests:
    """Requests that wait for a backend to come up, in no queue.

    Attributes:
        count: requests that are kept now.
        max_requests: the number of requests that may be kept. A tenant may have half of them.
    """

    def __init__(self, models: ServedModels, max_requests: int) -> None:
        self.count = 0
        self._of_tenant: Counter[str] = Counter()
        self._models = models
        self.max_requests = max_requests
        self._refusal: Callable[[], Exception] | None = None

    @property
    def on(self) -> bool:
        """Whether requests are kept at all."""
        return self.max_requests > 0

    async def until_up(
        self, model: str, tenant: str, until: float, *, refused: bool = False
    ) -> bool:
        """Wait until some backend of the model is up.

        Returns whether there was one to wait for and it came in time.

        Args:
            model: its name, as the backends know it.
            until: on the clock of the event loop.
            refused: a backend that seems to be up has just refused a connection.
        """
        served = self._models.may_be_served(model) and not refused
        if served or not self._has_room(tenant):
            return False
        self.count += 1
        self._of_tenant[tenant] += 1
        try:
            async with asyncio.timeout_at(until):
                if refused:
                    await asyncio.sleep(REFUSED_S)
                while not self._models.may_be_served(model):
                    if self._refusal is not None:
                        raise self._refusal()
                    await self._models.moved.wait()
        except TimeoutError:
            return False
        finally:
            self.count -= 1
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
        return True

    def end_all(self, refusal: Callable[[], Exception]) -> None:
        """Fail all requests that are kept, and all later requests, with `refusal()`."""
        self._refusal = refusal
        self._models.pulse()

    def _has_room(self, tenant: str) -> bool:
        most = self.max_requests
        return self.count < most and not (tenant and self._of_tenant[tenant] >= MAJORITY * most)
