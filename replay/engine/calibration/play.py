"""Play requests through one engine core in virtual time: no sockets, no sleeping."""

from collections import deque
from collections.abc import Iterable
from math import inf

from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import Request


def play(core: EngineCore, requests: Iterable[Request]) -> None:
    """Run `requests` to their ends; their fields then say when each token came.

    `arrival_s` is when the client sent a request; it reaches the scheduler `core.request_s`
    later, as on the server, and takes part in the step after.
    """
    coming = deque(sorted(requests, key=lambda request: request.arrival_s))
    now = 0.0
    while coming or core.has_work:
        due_s = coming[0].arrival_s + core.request_s if coming else inf
        if due_s <= now:
            core.add(coming.popleft())
        elif not core.has_work:
            now = due_s
        else:
            now += core.start_step(now)
            for request in core.finish_step().outputs:
                if request.first_token_s < 0:
                    request.first_token_s = now
                request.last_token_s = now
