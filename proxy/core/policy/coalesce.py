"""One prefill for many: which requests wait for another request's prefill?

Fifty users who open one document need its prefill once (single-flight). A request follows
 - a prefill in the engine that computes its prefix: sent now, it would compute the rest again,
 - a waiting request with a long prompt that shares more with it than the cache does (`leader`).
A follower is a cache hit once its leader's prefill has ended.
"""

from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import Final

from forebay.proxy.core.learn.prefix_cache import tokens_in
from forebay.proxy.core.model import Request
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.fleet import FleetQueues
from forebay.proxy.core.state.in_flight import STEP_TOKENS
from forebay.proxy.core.state.queue import QueuedRequest

AWAITED: Final = 2.0
"""In a chunking engine a follower would pass its leader. It waits for the leader only if that takes
at most this many times the saving of the cache hit. A shared system prompt saves little. Halved: 50
users who ask at once have their document computed four times instead of once."""


def expected_tokens(backend: Backend, waiting: QueuedRequest) -> tuple[int, QueuedRequest | None]:
    """Return the tokens expected to be cached at dispatch, and the leader that will cache them.

    The leader is None if no other waiting request computes more than is cached already.
    """
    request = waiting.request
    matched = backend.matched_tokens(request)
    if not (backend.leaders.by_id and request.reads_cache):
        return matched, None
    cached_blocks = int(matched / request.block_tokens)
    blocks, leader = backend.leaders.longest_run(request, cached_blocks)
    expected = tokens_in(blocks, request)
    return (expected, leader) if expected > matched else (matched, None)


def still_leads(backend: Backend, leader: QueuedRequest | None) -> bool:
    """True if this request still waits to be sent here."""
    return leader is not None and leader.request.id in backend.leaders.by_id


def must_follow(backend: Backend, request: Request) -> bool:
    """True if the request's prefix is being computed here for another request.

    Sent now, the request would compute the missing part of its prefix once more.
    """
    if not (backend.prefills and request.reads_cache):
        return False
    blocks = request.blocks
    matched = backend.cache.prefixes.match(blocks)
    if not matched:
        return False
    most_s = inf
    if backend.prefill_queue.chunked:
        tokens = request.prompt_tokens
        saved_s = backend.prefill_s(request, 0) - backend.prefill_s(
            request, min(tokens - 1, int(matched * request.block_tokens))
        )
        # The follower would pass its leader. A shared system prompt is not worth the wait.
        most_s = AWAITED * saved_s
    return backend.prefill_queue.computes(blocks, matched, most_s)


def keeps_back(backend: Backend, waiting: QueuedRequest) -> bool:
    """True if a head may not be sent yet, because it must follow here.

    Never because of a request that waits behind it. An engine that computes prefills in order has
    the leader's blocks when it begins the follower, in the step that ends the leader's prefill at
    the earliest. So there the follower is sent as soon as any hit would be (`dispatch_ahead`).
    """
    return backend.prefill_queue.chunked and must_follow(backend, waiting.request)


def freed_followers(backend: Backend) -> Iterator[tuple[QueuedRequest, float]]:
    """Find followers here whose leader's prefill has ended or will not happen.

    Yields:
        The follower, and its prefill in seconds with the blocks cached now.
    """
    for waiting in list(backend.followers.by_id.values()):
        request = waiting.request
        if waiting.backend != backend.name:  # it left together with an earlier follower
            continue
        if still_leads(backend, waiting.leader) or must_follow(backend, request):
            continue
        matched, _ = expected_tokens(backend, waiting)
        prefill_s = backend.prefill_s(request, matched)
        yield waiting, prefill_s


def others_want(backend: Backend, request: Request, tokens: int) -> bool:
    """True if another request waits here for these tokens of its prefix, or computes them.

    Block hashes are chained: prompts that are equal in one block are equal in all before it.
    """
    # An engine that publishes its blocks counts `tokens` in its own block size, so they may end
    # behind the last block of the request.
    place = min(round(tokens / request.block_tokens), len(request.blocks)) - 1
    if place < 0:
        return False
    block = request.blocks[place]
    blocks = request.blocks
    waiting = chain(backend.leaders.near(blocks, place), backend.followers.near(blocks, place))
    others = chain((w.request for w in waiting), (p.request for p in backend.prefills.values()))
    return any(
        len(other.blocks) > place and other.blocks[place] == block and other.id != request.id
        for other in others
    )


def loses_hit(waiting: QueuedRequest, home: Backend, other: Backend) -> bool:
    """True if a request would have its prefix computed once more on another backend.

    Such a copy is begun when a request arrives or not at all: later, the hit at home is near.
    """
    expected, _ = expected_tokens(home, waiting)
    return expected - other.matched_tokens(waiting.request) > STEP_TOKENS


def awaited_tokens(backend: Backend, waiting: QueuedRequest) -> int:
    """Return the tokens of its prefix that another request's prefill will cache here, or 0."""
    expected, leader = expected_tokens(backend, waiting)
    follows = leader is not None or must_follow(backend, waiting.request)
    return expected if follows else 0


def hits_elsewhere(
    backend: Backend, queues: FleetQueues
) -> Iterator[tuple[QueuedRequest, Backend]]:
    """Find requests that wait for other backends although this backend has cached more of them.

    Yields:
        The waiting request and the backend it waits for.
    """
    for home in list(queues.backends.values()):
        if home is backend:
            continue
        everyone = [*home.leaders.by_id.values(), *home.followers.by_id.values()]
        for waiting in everyone:
            request = waiting.request
            if waiting.backend != home.name or not backend.cache.may_match(request):
                continue
            if backend.matched_tokens(request) - home.matched_tokens(request) > STEP_TOKENS:
                yield waiting, home
