"""A routing policy for Forebay: a document stays where it is cached, unless the queue is long."""

from collections.abc import Sequence

from forebay.proxy.routing import Engine, Request

MOST_EXTRA_WAIT_S = 1.0


def choose(request: Request, engines: Sequence[Engine], now: float) -> Engine:
    """Pick the engine that holds most of the prompt, if it costs at most a second more of waiting.

    Otherwise pick the one that can begin first; of equal ones, that with the fewest requests.
    """
    first = min(engines, key=lambda engine: (engine.wait_s, engine.requests))
    warmest = max(engines, key=lambda engine: engine.matched_tokens)
    if warmest.matched_tokens and warmest.wait_s <= first.wait_s + MOST_EXTRA_WAIT_S:
        return warmest
    return first
