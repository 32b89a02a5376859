"""Play requests on an engine core behind its API server, in virtual time."""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf

from forebay.replay.engine.api_server import ApiProcess
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
    processes: dict[EngineRequest, ApiProcess] = {}
    arriving: list[tuple[float, int, EngineRequest]] = []  # on their way through the server
    for request in sorted(requests, key=lambda request: request.arrival_s):
        process = processes[request] = server.next_process()
        at_s = process.receive(request.prompt_tokens, request.arrival_s)
        heappush(arriving, (at_s, len(arriving), request))
    now = 0.0
    while arriving or core.has_work:
        due_s = arriving[0][0] if arriving else inf
        if due_s <= now:
            core.add(heappop(arriving)[2])
        elif not core.has_work:
            now = due_s
        else:
            now += core.start_step(now)
            rate = core.tokens_per_s
            step = core.finish_step()
            for request in step.outputs:
                process = processes[request]
                if request.first_token_s < 0:
                    at_s = process.answer(request.prompt_tokens, now)
                    request.first_token_s = at_s
                else:
                    at_s = max(process.sent_at(now), request.last_token_s)
                request.last_token_s = at_s
                if on_token is not None:
                    on_token(request, at_s)
            server.load(rate, now)
            if until is not None and until in step.finished:
                return
