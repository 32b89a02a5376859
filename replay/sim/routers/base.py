"""Define what all models of other routers have in common, and the clients that have no router.

A model sends each request at once to the engine that it chooses, unless it says otherwise. It knows
as much as its router: prompt lengths if that router counts tokens, the state of engines if it asks
them. Prompts are compared in the blocks of the trace.
"""

from math import inf

from forebay.proxy.core.learn.prefix_cache import DEFAULT_INDEX_BLOCKS
from forebay.proxy.core.learn.prefix_index import PrefixIndex
from forebay.proxy.core.model import Action, Request, Send


class EngineView:
    """One engine as a router sees it: the requests in flight there, and the prompts sent so far."""

    def __init__(self, name: str, number: int, kv_tokens: float) -> None:
        self.name = name
        self.number = number
        self.kv_tokens = kv_tokens
        self.running = 0  # requests
        self.tokens = 0  # prompt tokens of these requests
        self.prefill_tokens = 0  # uncached prompt tokens of requests before their first token
        self.index = PrefixIndex(DEFAULT_INDEX_BLOCKS)

    def matched(self, request: Request) -> int:
        """Return the prompt tokens that the router has sent to this engine before."""
        blocks = self.index.match(request.blocks)
        return min(int(blocks * request.block_tokens), request.prompt_tokens)


class RoutedRequest:
    """A request in flight, and the engine it was sent to."""

    def __init__(self, request: Request, place: EngineView, uncached: int) -> None:
        self.request = request
        self.place = place
        self.uncached = uncached  # tokens of the prompt
        self.answered = False


class RouterModel:
    """A router that sends each request at once to the engine of `choose`, without rejections."""

    wants_usage = False

    def __init__(self) -> None:
        self.places: list[EngineView] = []
        self.sent: dict[str, RoutedRequest] = {}

    def choose(self, request: Request) -> EngineView:
        raise NotImplementedError

    def backend_up(self, name: str, now: float, kv_tokens: float | None = None) -> list[Action]:
        self.places.append(EngineView(name, len(self.places), kv_tokens or inf))
        return []

    def arrive(self, request: Request, now: float) -> list[Action]:
        return [self.send(request, self.choose(request), now)]

    def send(self, request: Request, place: EngineView, now: float, queued_s: float = 0.0) -> Send:
        uncached = request.prompt_tokens - place.matched(request)
        place.index.touch(request.blocks)
        place.running += 1
        place.tokens += request.prompt_tokens
        place.prefill_tokens += uncached
        self.sent[request.id] = RoutedRequest(request, place, uncached)
        return Send(request, place.name, "", queued_s, 0.0, 0)

    def first_token(self, request_id: str, now: float) -> list[Action]:
        sent = self.sent[request_id]
        if not sent.answered:
            sent.answered = True
            sent.place.prefill_tokens -= sent.uncached
        return []

    def used(
        self,
        request_id: str,
        output_tokens: int,
        now: float,
        cached_tokens: int | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        pass

    def finish(self, request_id: str, now: float) -> list[Action]:
        actions = self.first_token(request_id, now)
        sent = self.sent.pop(request_id)
        sent.place.running -= 1
        sent.place.tokens -= sent.request.prompt_tokens
        return actions

    def wake_at(self) -> float:
        return inf

    def wake(self, now: float) -> list[Action]:
        return []

    def least_running(self) -> EngineView:
        return min(self.places, key=lambda p: p.running)


class InTurn(RouterModel):
    """Clients without a proxy: the engines in turn.

    No request is remembered, so that nothing slows the simulation of engines alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def arrive(self, request: Request, now: float) -> list[Action]:
        place = self.places[self._next % len(self.places)]
        self._next += 1
        return [Send(request, place.name, "", 0.0, 0.0, 0)]

    def first_token(self, request_id: str, now: float) -> list[Action]:
        return []

    def finish(self, request_id: str, now: float) -> list[Action]:
        return []
