"""How long would a request wait for KV cache? Running requests give theirs back in turn."""

from collections.abc import Sequence
from itertools import islice
from math import fsum, sqrt

from forebay.proxy.core.model import ENOUGH, FULL, MAJORITY, Request
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.in_flight import STEP_TOKENS
from forebay.proxy.core.state.kv_budget import reserved
from forebay.proxy.core.state.queue import QueuedRequest


def kv_need(backend: Backend, waiting: QueuedRequest, led_tokens: int = 0) -> float:
    """Return the tokens of KV cache that a waiting request will add.

    Its answer counts as answers of running requests do: many together never hold all that is
    reserved for them.

    Args:
        led_tokens: tokens of its prompt that the request before it will have computed.
    """
    answer = backend.kv.answer_share * reserved(waiting.output_tokens, backend.kv_tokens)
    need = backend.kv.need(waiting.request, 0)
    return answer + (min(need, waiting.request.prompt_tokens - led_tokens) if led_tokens else need)


def kv_wait_s(
    backend: Backend, waiting: QueuedRequest, before_tokens: float, now: float
) -> tuple[float, float]:
    """Return the predicted wait for KV cache, and its standard deviation, in seconds.

    A prefix that several running requests share comes free with the last of them only. So what
    comes free is taken from the requests that have ended. The number of requests that end in a
    time is taken to be a Poisson variable.

    Args:
        before_tokens: KV cache that waiting requests will take before.
    """
    held, running = backend.kv.held, len(backend.in_flight)
    if not held or not running:
        return 0.0, 0.0
    request, room = waiting.request, FULL * backend.kv_tokens - held
    if request.prompt_tokens + waiting.output_tokens + before_tokens <= room:
        return 0.0, 0.0
    need = backend.kv.need(request, reserved(waiting.output_tokens, backend.kv_tokens))
    missing = need + before_tokens - room
    if request.tenant:
        missing -= backend.holdings.lent(request.tenant) * FULL * backend.kv_tokens
    if missing <= 0.0:
        return 0.0, 0.0
    freed = backend.kv.freed
    ends = missing / max(1.0, freed.value if freed.seen >= ENOUGH else held / running)
    answer_s = _answer_s(backend, now)
    wait_s = ends / running * answer_s
    return max(wait_s, _left_s(backend, int(ends), answer_s, now)), wait_s / sqrt(1.0 + ends)


def _left_s(backend: Backend, place: int, answer_s: float, now: float) -> float:
    """Return the time until an answer ends that was begun after `place` others.

    After a burst all answers are young, so the first of them ends much later.
    """
    sent = next(islice(backend.in_flight.values(), place, None), None)
    if sent is None or sent.first_token_at is None:
        return answer_s
    return answer_s - (now - sent.first_token_at)


def _answer_s(backend: Backend, now: float) -> float:
    """Return the time that an answer takes.

    Until enough have ended, the running ones are taken to be in the middle of their answers.
    """
    ended = backend.decode_all_s
    if ended.seen >= ENOUGH:
        return ended.value
    sent_at = fsum(running.sent_at for running in backend.in_flight.values())
    return max(ended.value, 2.0 * (now - sent_at / len(backend.in_flight)))


def kv_use(backend: Backend, request: Request) -> tuple[float, int]:
    """Return the share of the KV cache that running and waiting requests take, and the tokens that
    this prompt would add.

    These are not counted, and 0, while at most half of the cache is used: they decide nothing then.
    """
    tokens = backend.kv.held
    if backend.queued:
        tokens += fsum([queue.kv_tokens for queue in backend.queues.values()])
    used = tokens / backend.kv_tokens
    return used, backend.kv.need(request, 0) if used > MAJORITY else 0


def without_copies(options: Sequence[Option]) -> list[Option]:
    """Return the options, without copies of a prefix that a backend holds for running requests.

    A copy takes KV cache for as long as its prefix is in use. So none is made once more than half
    of every pool is in use. The last turn of a session is in use no more, so its next turn may go
    anywhere.
    """
    if len(options) == 1 or min([o.kv_used for o in options]) <= MAJORITY:
        return list(options)
    least = min([o.kv_tokens for o in options]) + STEP_TOKENS
    return [o for o in options if o.kv_tokens <= least]
