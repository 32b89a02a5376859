"""Look for a model that no backend names, before a request for it is 404."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from math import inf

from forebay.proxy.backends.probes import Prober
from forebay.proxy.backends.served_models import ServedModels
from forebay.proxy.http1 import errors

ASKED_AGAIN_S, ASKED_PER_S = 1.0, 50.0  # how often at most, and for how many backends


class ModelSearch:
    """Asks the backends for their models again, before their time."""

    def __init__(self, models: ServedModels, prober: Prober, clock: Callable[[], float]) -> None:
        self._models = models
        self._prober = prober
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = -inf

    def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()

    async def must_have(self, model: str) -> str:
        """Return `Request.model` for a model. Raises ApiError 404 if no backend has the model.

        Before that the backends are asked again, as an adapter may have been loaded a moment ago.
        They are asked once in a while, however many requests name models that do not exist.

        Args:
            model: as the backends know it.
        """
        if self._models.nobody_has(model):
            now, links = self._clock(), self._models.told()
            due = now >= self._asked_at + max(ASKED_AGAIN_S, len(links) / ASKED_PER_S)
            if self._asking is None or (self._asking.done() and due):
                self._asked_at = now
                questions = map(self._prober.ask_models, links)
                self._asking = asyncio.create_task(_all(questions))
            await asyncio.shield(self._asking)
            if self._models.nobody_has(model):
                raise errors.no_such_model(model, self._models.names())
        return self._models.named(model).route


async def _all(questions: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*questions, return_exceptions=True)
