"""Play requests on an engine core behind its API server, in virtual time."""

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf

from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import EngineRequest


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
    sent = deque(sorted(requests, key=lambda request: request.arrival_s))
    arriving: list[tuple[float, int, EngineRequest]] = []  # on their way through the server
    count = 0

    def receive(until_s: float) -> None:
        """Let the server take in what clients send up to this time."""
        nonlocal count
        while sent and sent[0].arrival_s <= until_s:
            request = sent.popleft()
            request.process = server.next_process()
            at_s = request.process.receive(request.prompt_tokens, request.arrival_s)
            heappush(arriving, (at_s, count, request))
            count += 1

    now = 0.0
    while sent or arriving or core.has_work:
        receive(now)
        while arriving and arriving[0][0] <= now:
            core.add(heappop(arriving)[2])
        if not core.has_work:
            now = min(arriving[0][0] if arriving else inf, sent[0].arrival_s if sent else inf)
            continue
        seconds = core.start_step(now)
        server.load(core.tokens_per_s, now)
        now += seconds
        receive(now)
        step = core.finish_step()
        for request in step.outputs:
            assert request.process is not None
            if request.first_token_s < 0:
                request.last_token_s = request.process.answer(request.prompt_tokens, now)
                request.first_token_s = request.last_token_s
            else:
                request.last_token_s = max(request.process.sent_at(now), request.last_token_s)
            if on_token is not None:
                on_token(request, request.last_token_s)
        if until is not None and until in step.finished:
            return
        if not core.has_work:
            server.load(0.0, now)
