"""Forebay with one part of its policy switched off each, from outside: the core has no switches.

A part is switched off by replacing the function that decides it while a run is played; so this
needs the plain Python source, not the compiled one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any
from unittest.mock import patch

from forebay.proxy.core.arrival import NewRequests
from forebay.proxy.core.learn.cost import CostModel
from forebay.proxy.core.learn.decay import LOAD_TIME_S
from forebay.proxy.core.model import Bucket, RejectReason, Request
from forebay.proxy.core.policy.admission import Placement, in_time_wait_s
from forebay.proxy.core.policy.forecast import Forecast, error_margin_s
from forebay.proxy.core.policy.kv_wait import kv_wait_s
from forebay.proxy.core.policy.long_prefills import LongPrefills
from forebay.proxy.core.policy.precedence import Precedence
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.policy.start import StartGate, below
from forebay.proxy.core.policy_state import PolicyState
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.fleet import FleetQueues
from forebay.proxy.core.state.queue import Leaders, QueuedRequest

CORE = "forebay.proxy.core"
FOLLOWING = ("steps", "policy.coalesce", "policy.forecast", "policy.start")  # must_follow


def _settled_only(self: Backend, request: Request) -> int:
    """Matched tokens without those of prefills that are still running."""
    blocks = self.cache.prefixes.match(request.blocks)
    for flight in self.prefills.values():
        theirs = flight.request.blocks
        known = round(
            (flight.request.prompt_tokens - flight.uncached_tokens) / request.block_tokens
        )
        if known < min(blocks, len(theirs)) and theirs[known] == request.blocks[known]:
            blocks = known
    return max(0, min(int(blocks * request.block_tokens), request.prompt_tokens - 1))


def _earliest(backend: Backend, ready: Sequence[QueuedRequest], now: float) -> QueuedRequest:
    return min(ready, key=lambda w: (w.deadline, w.order))


def _first_come(backend: Backend, ready: Sequence[QueuedRequest], now: float) -> QueuedRequest:
    return min(ready, key=lambda w: w.order)


def _nothing(state: PolicyState, backend: Backend) -> None:
    backend.review = False


def _no_reading(options: Sequence[Option], spreads: bool) -> list[float]:
    return [0.0] * len(options)


def _own_reading(options: Sequence[Option], spreads: bool) -> list[float]:
    return [spreads * option.decode_s for option in options]


def _no_cancelling(backend: Backend, wait_s: float, before_s: float, alike: float = 1) -> float:
    return error_margin_s(backend, wait_s, before_s)


def _no_spread(
    backend: Backend, waiting: QueuedRequest, before_tokens: float, now: float
) -> tuple[float, float]:
    return kv_wait_s(backend, waiting, before_tokens, now)[0], 0.0


def _with_late_copies(self: Forecast, options: list[Option], *_: Any) -> list[Option]:
    return options


def _no_room_beside(
    self: StartGate,
    backend: Backend,
    uncached_tokens: float,
    priority: float | None,
    ahead_s: float,
    now: float,
) -> bool:
    return below(backend.prefill_queue.drain_s(uncached_tokens, now, priority), ahead_s)


def _as_if_busy(
    self: NewRequests, waiting: QueuedRequest, bucket: Bucket, place: Placement, now: float
) -> RejectReason | None:
    return self._admit(waiting.request, place.limits, place.option, place.queued, False)


def _in_time_wait_s(request: Request, bucket: Bucket, option: Option) -> float:
    return in_time_wait_s(request, bucket, option.prefill_s)


def _returns(value: Any) -> Any:
    return lambda *_, **__: value


NOISE = "nothing (chance: STRETCH 4.99 instead of 5)"
STANDS = ("policy_state", "steps")  # import `stands`
Patches = Sequence[tuple[Any, str, Any]]
# By part: what is replaced where.
WITHOUT: dict[str, Patches] = {
    "single-flight (follow a prefill)": ((Backend, "matched_tokens", _settled_only),),
    "partition": ((LongPrefills, "long_s", _returns(inf)),),
    "STEP_TOKENS (hits count as prefills)": (
        (f"{CORE}.state.in_flight", "STEP_TOKENS", 0),
        (f"{CORE}.policy.start", "STEP_TOKENS", 0),
    ),
    "followers wait for their leader": tuple(
        (f"{CORE}.{where}", "must_follow", _returns(False)) for where in FOLLOWING
    ),
    "followers are hits at last": ((f"{CORE}.steps", "_review", _nothing),),
    "joining who waits for an engine": ((Leaders, "add", _returns(None)),),
    "going where it is computed by now": ((f"{CORE}.steps", "_gather", _returns(False)),),
    "shares of buckets (EDF alone)": ((f"{CORE}.steps", "first", _earliest),),
    "shortest first (EDF in a bucket)": ((f"{CORE}.policy.order", "STRETCH", inf),),
    "deadlines (first come)": ((f"{CORE}.steps", "first", _first_come),),
    "margins of predictions": ((f"{CORE}.policy.forecast", "error_margin_s", _returns(0.0)),),
    "learned costs": ((CostModel, "observe", _returns(None)),),
    "work stealing": ((f"{CORE}.steps", "_better_here", _returns(None)),),
    "KV reckoning": (
        (f"{CORE}.policy.start", "lacks", _returns("")),
        (f"{CORE}.policy.forecast", "kv_wait_s", _returns((0.0, 0.0))),
    ),
    "who waits keeps its hit": ((f"{CORE}.steps", "loses_hit", _returns(False)),),
    "shares of the last seconds (173 s)": ((f"{CORE}.state.backend", "RECENT_S", LOAD_TIME_S),),
    "shorter ones that may come later": (
        (f"{CORE}.policy.precedence", "shorter_s", _returns(0.0)),
    ),
    "a copy for one request counts twice": (
        (f"{CORE}.policy.forecast", "others_want", _returns(True)),
    ),
    NOISE: ((f"{CORE}.policy.order", "STRETCH", 4.99),),
    "long prompts rejected (crowd_s)": ((LongPrefills, "crowd_s", _returns(0.0)),),
    "chunks of longer prefills (beside_s)": ((Precedence, "beside_s", _returns(0.0)),),
    "overtaking": ((Precedence, "overtaken", _returns(0.0)),),
    "shares in predictions": ((Precedence, "_owed_s", _returns(0.0)),),
    "errors that cancel": ((f"{CORE}.policy.forecast", "error_margin_s", _no_cancelling),),
    "errors by length": ((f"{CORE}.learn.cost", "EDGES_S", ()),),
    "at least this share of all errors (OF_ALL)": ((f"{CORE}.learn.cost", "OF_ALL", 1.5),),
    "prefills disturb (DISTURBS)": ((f"{CORE}.policy.routing", "DISTURBS", 0.0),),
    "decoding (spreads)": ((f"{CORE}.policy.routing", "_delays_s", _no_reading),),
    "a busy server decodes most": ((f"{CORE}.policy.routing", "_delays_s", _own_reading),),
    "no late copies": ((Forecast, "without_late_copies", _with_late_copies),),
    "no copies while caches fill": ((f"{CORE}.policy.forecast", "without_copies", list),),
    "followers sent ahead (takes_followers)": (
        (f"{CORE}.policy.start", "takes_followers", _returns(False)),
    ),
    "prefills that share a step": ((StartGate, "_passes", _no_room_beside),),
    "a queue that stands": tuple(
        (f"{CORE}.{where}", "stands", _returns(False)) for where in STANDS
    ),
    "half of a queue that stands": ((FleetQueues, "has_overflowed", _returns(False)),),
    "half only after a rejection (overflow)": ((FleetQueues, "has_overflowed", _returns(True)),),
    "a burst waits beyond its deadline": ((f"{CORE}.shaper", "waits_on", _returns(False)),),
    "sent prefills reject none (sent_s)": (
        (f"{CORE}.policy.admission", "longest_wait_s", _in_time_wait_s),
    ),
    "spread of the wait for KV cache": ((f"{CORE}.policy.forecast", "kv_wait_s", _no_spread),),
    "the next answer's end (_left_s)": ((f"{CORE}.policy.kv_wait", "_left_s", _returns(0.0)),),
    "an idle server rejects none": ((NewRequests, "_reason", _as_if_busy),),
}


@contextmanager
def replaced(patches: Patches) -> Iterator[None]:
    """Replace functions and constants of the policy, while the context lasts."""
    with ExitStack() as stack:
        for where, name, instead in patches:
            if isinstance(where, str):
                stack.enter_context(patch(f"{where}.{name}", instead))
            else:
                stack.enter_context(patch.object(where, name, instead))
        yield
