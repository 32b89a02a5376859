"""Requests for tests of the core."""

from forebay.proxy.core.model import Request

BLOCK = 512


def document(name: str, tokens: int = 120_000, first: int = 0, **more: object) -> Request:
    blocks = tuple(range(first, first + tokens // BLOCK))
    return Request(name, tokens, 100, blocks, float(BLOCK), **more)  # type: ignore[arg-type]
