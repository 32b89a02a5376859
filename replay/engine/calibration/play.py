"""Play requests through one engine core in virtual time: no sockets, no sleeping."""

from collections import deque
from collections.abc import Iterable
from math import inf

from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import EngineRequest


def play(core: EngineCore, requests: Iterable[EngineRequest]) -> None:
    """Run `requests` to their ends and set `first_token_s` and `last_token_s` of each.

    `arrival_s` is when the client sent a request. The request reaches the scheduler
    `core.request_s` later, as on the server, and takes part in the step after.
    """
    arriving = deque(sorted(requests, key=lambda request: request.arrival_s))
    now = 0.0
    while arriving or core.has_work:
        due_s = arriving[0].arrival_s + core.request_s if arriving else inf
        if due_s <= now:
            core.add(arriving.popleft())
        elif not core.has_work:
            now = due_s
        else:
            now += core.start_step(now)
            for request in core.finish_step().outputs:
                if request.first_token_s < 0:
                    request.first_token_s = now
                request.last_token_s = now
