"""Requests for tests of the core, shapers whose backends are up, and what they send."""

from collections.abc import Sequence

from forebay.proxy.core.model import Action, Request, Send
from forebay.proxy.core.shaper import Shaper

BLOCK = 512


def document(name: str, tokens: int = 120_000, first: int = 0, **more: object) -> Request:
    blocks = tuple(range(first, first + tokens // BLOCK))
    return Request(name, tokens, 100, blocks, float(BLOCK), **more)  # type: ignore[arg-type]


def all_up(shaper: Shaper) -> Shaper:
    """Return a shaper after all its backends have come up, at 0 s."""
    for name in shaper.backends:
        shaper.backend_up(name, 0.0)
    return shaper


def sends(actions: Sequence[Action]) -> list[tuple[str, str]]:
    """Return the requests that are sent, each with its backend."""
    return [(a.request.id, a.backend) for a in actions if isinstance(a, Send)]


def sent_ids(actions: Sequence[Action]) -> list[str]:
    return [name for name, _ in sends(actions)]


def sent_to(actions: Sequence[Action]) -> list[str]:
    """Return the backends to which requests are sent."""
    return [backend for _, backend in sends(actions)]
