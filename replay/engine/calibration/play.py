"""Play requests on an engine core behind its API server, in virtual time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from math import inf

from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.timing.api_server import ApiServer


def play(
    core: EngineCore,
    requests: Iterable[EngineRequest],
    on_token: Callable[[EngineRequest, float], None] | None = None,
    until: EngineRequest | None = None,
) -> None:
    """Run `requests` to their ends and set `first_token_s` and `last_token_s` of each.

    `arrival_s` is when the client sent a request, the other times are when it has the token. A
    request takes part in the step after it has passed the API server.

    Args:
        on_token: takes each token's request and time.
        until: all other requests end with this one.
    """
    server = core.api_server()
    arrivals = _Arrivals(server, requests)
    now = 0.0
    while arrivals.next_at() < inf or core.has_work:
        # Start a step with the requests that have passed the server.
        arrivals.receive(now)
        for request in arrivals.through(now):
            core.add(request)
        if not core.has_work:
            now = arrivals.next_at()
            continue
        seconds = core.start_step(now)
        server.load(core.tokens_per_s, core.streams, now)
        now += seconds
        arrivals.receive(now)
        step = core.finish_step()
        # The server decodes the prompts behind first tokens, then it sends the later tokens.
        for request in sorted(step.outputs, key=lambda request: request.first_token_s >= 0):
            _send_token(request, now)
            if on_token is not None:
                on_token(request, request.last_token_s)
        if until is not None and until in step.finished:
            return
        if not core.has_work:
            server.load(0.0, 0, now)


class _Arrivals:
    """Requests that the engine does not have yet: unsent, or in the API server."""

    def __init__(self, server: ApiServer, requests: Iterable[EngineRequest]) -> None:
        self._server = server
        self._unsent = deque(sorted(requests, key=lambda request: request.arrival_s))
        self._inside: list[tuple[float, int, EngineRequest]] = []  # heap, by exit time
        self._count = 0

    def next_at(self) -> float:
        """Return when the next request is sent or through, inf without any."""
        through_at = self._inside[0][0] if self._inside else inf
        return min(through_at, self._unsent[0].arrival_s if self._unsent else inf)

    def receive(self, until_s: float) -> None:
        """Let the server read the requests that clients send up to this time."""
        while self._unsent and self._unsent[0].arrival_s <= until_s:
            request = self._unsent.popleft()
            request.process = self._server.next_process()
            at_s = request.process.receive(request.prompt_tokens, request.arrival_s)
            heappush(self._inside, (at_s, self._count, request))
            self._count += 1

    def through(self, now: float) -> Iterator[EngineRequest]:
        """Remove and yield the requests that have passed the server."""
        while self._inside and self._inside[0][0] <= now:
            yield heappop(self._inside)[2]


def _send_token(request: EngineRequest, now: float) -> None:
    """Pass a token that a step produced now through the API server."""
    assert request.process is not None
    if request.first_token_s < 0:
        request.last_token_s = request.process.answer(request.prompt_tokens, now)
        request.first_token_s = request.last_token_s
    else:
        request.last_token_s = max(request.process.sent_at(now), request.last_token_s)
