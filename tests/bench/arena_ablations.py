"""Forebay with one part of its policy switched off each, from outside: the core has no switches.

A part is switched off by another configuration or by replacing the function that decides it while
a run is played; so this needs the plain Python source, not the compiled one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf
from typing import Any
from unittest.mock import patch

from forebay.proxy.config.backends import BackendConfig
from forebay.proxy.config.schema import BucketConfig, Config
from forebay.proxy.core.arrival import NewRequests
from forebay.proxy.core.learn.cost import CostModel
from forebay.proxy.core.learn.decay import LOAD_TIME_S
from forebay.proxy.core.model import Action, Bucket, RejectReason, Request
from forebay.proxy.core.policy.admission import Placement, in_time_wait_s, refuse
from forebay.proxy.core.policy.forecast import Forecast, error_margin_s
from forebay.proxy.core.policy.kv_wait import kv_wait_s
from forebay.proxy.core.policy.long_prefills import LongPrefills
from forebay.proxy.core.policy.precedence import Precedence
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.policy.start import StartGate, below
from forebay.proxy.core.policy_state import PolicyState
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.fleet import FleetQueues
from forebay.proxy.core.state.queue import Leaders, QueuedRequest
from forebay.proxy.core.steps import dispatch_all
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.fleet import Policy
from forebay.replay.sim.scenario import Scenario

CORE = "forebay.proxy.core"
FOLLOWING = ("steps", "policy.coalesce", "policy.forecast", "policy.start")  # must_follow
CHAT = BucketConfig(name="chat", up_to=5_000, max_wait=2.0)
DOCUMENT = BucketConfig(name="document", up_to=131_072, max_wait=30.0)


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


def _no_deadline(self: Shaper) -> float:
    core = self._state
    heads = core.queues.heads()
    return core.forecast.next_moment(heads, core.now) if core.queues.waiting else inf


def _only_dispatch(self: Shaper, now: float) -> list[Action]:
    return dispatch_all(self._state.at(now), now)


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
KNOWING = "knowing the flag (with --chunk)"
STANDS = ("policy_state", "steps")  # import `stands`
Patches = Sequence[tuple[Any, str, Any]]
# By part: another configuration, and what is replaced where.
WITHOUT: dict[str, tuple[Config, str, Patches]] = {
    "affinity": (Config(), "least_work", ()),
    "min_match (any match counts)": (
        Config.model_validate({"affinity": {"min_match": 0}}), "warm_or_least_work", (),
    ),
    "single-flight (follow a prefill)": (
        Config(), "warm_or_least_work", ((Backend, "matched_tokens", _settled_only),),
    ),
    "partition": (Config(), "warm_or_least_work", ((LongPrefills, "long_s", _returns(inf)),)),
    "late binding": (
        Config.model_validate({"admission": {"dispatch_ahead": 1e6}}), "warm_or_least_work", (),
    ),
    "one document prefill at a time": (
        Config(buckets=(CHAT, DOCUMENT)), "warm_or_least_work", (),
    ),
    "STEP_TOKENS (hits count as prefills)": (
        Config(), "warm_or_least_work",
        ((f"{CORE}.state.in_flight", "STEP_TOKENS", 0), (f"{CORE}.policy.start", "STEP_TOKENS", 0)),
    ),
    "followers wait for their leader": (
        Config(), "warm_or_least_work",
        tuple((f"{CORE}.{where}", "must_follow", _returns(False)) for where in FOLLOWING),
    ),
    "followers are hits at last": (
        Config(), "warm_or_least_work", ((f"{CORE}.steps", "_review", _nothing),),
    ),
    "joining who waits for an engine": (
        Config(), "warm_or_least_work", ((Leaders, "add", _returns(None)),),
    ),
    "going where it is computed by now": (
        Config(), "warm_or_least_work", ((f"{CORE}.steps", "_gather", _returns(False)),),
    ),
    "shares of buckets (EDF alone)": (
        Config(), "warm_or_least_work", ((f"{CORE}.steps", "first", _earliest),),
    ),
    "shortest first (EDF in a bucket)": (
        Config(), "warm_or_least_work", ((f"{CORE}.policy.order", "STRETCH", inf),),
    ),
    KNOWING: (Config(), "warm_or_least_work", ()),
    "deadlines (first come)": (
        Config(), "warm_or_least_work", ((f"{CORE}.steps", "first", _first_come),),
    ),
    "admission": (
        Config(), "warm_or_least_work",
        (
            (Shaper, "wake", _only_dispatch),
            (Shaper, "wake_at", _no_deadline),
        ),
    ),
    "margins of predictions": (
        Config(), "warm_or_least_work",
        ((f"{CORE}.policy.forecast", "error_margin_s", _returns(0.0)),),
    ),
    "learned costs": (Config(), "warm_or_least_work", ((CostModel, "observe", _returns(None)),)),
    "work stealing": (
        Config(), "warm_or_least_work", ((f"{CORE}.steps", "_better_here", _returns(None)),),
    ),
    "KV reckoning": (
        Config(), "warm_or_least_work",
        (
            (f"{CORE}.policy.start", "lacks", _returns("")),
            (f"{CORE}.policy.forecast", "kv_wait_s", _returns((0.0, 0.0))),
        ),
    ),
    "who waits keeps its hit": (
        Config(), "warm_or_least_work", ((f"{CORE}.steps", "loses_hit", _returns(False)),),
    ),
    "shares of the last seconds (173 s)": (
        Config(), "warm_or_least_work", ((f"{CORE}.state.backend", "RECENT_S", LOAD_TIME_S),),
    ),
    "shorter ones that may come later": (
        Config(), "warm_or_least_work",
        ((f"{CORE}.policy.precedence", "shorter_s", _returns(0.0)),),
    ),
    "a copy for one request counts twice": (
        Config(), "warm_or_least_work",
        ((f"{CORE}.policy.forecast", "others_want", _returns(True)),),
    ),
    "max_concurrency 640 (64)": (
        Config(backends=(BackendConfig(url="http://h:1", max_concurrency=64),)),
        "warm_or_least_work", (),
    ),
    NOISE: (
        Config(), "warm_or_least_work", ((f"{CORE}.policy.order", "STRETCH", 4.99),),
    ),
    "long prompts rejected (crowd_s)": (
        Config(), "warm_or_least_work", ((LongPrefills, "crowd_s", _returns(0.0)),),
    ),
    "chunks of longer prefills (beside_s)": (
        Config(), "warm_or_least_work", ((Precedence, "beside_s", _returns(0.0)),),
    ),
    "overtaking": (
        Config(), "warm_or_least_work", ((Precedence, "overtaken", _returns(0.0)),),
    ),
    "shares in predictions": (
        Config(), "warm_or_least_work", ((Precedence, "_owed_s", _returns(0.0)),),
    ),
    "errors that cancel": (
        Config(), "warm_or_least_work",
        ((f"{CORE}.policy.forecast", "error_margin_s", _no_cancelling),),
    ),
    "errors by length": (
        Config(), "warm_or_least_work", ((f"{CORE}.learn.cost", "EDGES_S", ()),),
    ),
    "at least this share of all errors (OF_ALL)": (
        Config(), "warm_or_least_work", ((f"{CORE}.learn.cost", "OF_ALL", 1.5),),
    ),
    "prefills disturb (DISTURBS)": (
        Config(), "warm_or_least_work", ((f"{CORE}.policy.routing", "DISTURBS", 0.0),),
    ),
    "decoding (spreads)": (
        Config(), "warm_or_least_work", ((f"{CORE}.policy.routing", "_delays_s", _no_reading),),
    ),
    "a busy server decodes most": (
        Config(), "warm_or_least_work", ((f"{CORE}.policy.routing", "_delays_s", _own_reading),),
    ),
    "no late copies": (
        Config(), "warm_or_least_work", ((Forecast, "without_late_copies", _with_late_copies),),
    ),
    "no copies while caches fill": (
        Config(), "warm_or_least_work", ((f"{CORE}.policy.forecast", "without_copies", list),),
    ),
    "followers sent ahead (takes_followers)": (
        Config(), "warm_or_least_work",
        ((f"{CORE}.policy.start", "takes_followers", _returns(False)),),
    ),
    "prefills that share a step": (
        Config(), "warm_or_least_work", ((StartGate, "_passes", _no_room_beside),),
    ),
    "a queue that stands": (
        Config(), "warm_or_least_work",
        tuple((f"{CORE}.{where}", "stands", _returns(False)) for where in STANDS),
    ),
    "half of a queue that stands": (
        Config(), "warm_or_least_work", ((FleetQueues, "has_overflowed", _returns(False)),),
    ),
    "half only after a rejection (overflow)": (
        Config(), "warm_or_least_work", ((FleetQueues, "has_overflowed", _returns(True)),),
    ),
    "a burst waits beyond its deadline": (
        Config(), "warm_or_least_work", ((f"{CORE}.shaper", "waits_on", _returns(False)),),
    ),
    "sent prefills reject none (sent_s)": (
        Config(), "warm_or_least_work",
        ((f"{CORE}.policy.admission", "longest_wait_s", _in_time_wait_s),),
    ),
    "spread of the wait for KV cache": (
        Config(), "warm_or_least_work", ((f"{CORE}.policy.forecast", "kv_wait_s", _no_spread),),
    ),
    "the next answer's end (_left_s)": (
        Config(), "warm_or_least_work", ((f"{CORE}.policy.kv_wait", "_left_s", _returns(0.0)),),
    ),
    "an idle server rejects none": (
        Config(), "warm_or_least_work", ((NewRequests, "_reason", _as_if_busy),),
    ),
}  # fmt: skip


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


@contextmanager
def switched_off(part: str, engine: EngineConfig, names: Sequence[str]) -> Iterator[Policy]:
    """Forebay without the part, while the context lasts."""
    config, policy, patches = WITHOUT[part]
    with replaced(patches):
        if part == KNOWING:
            engine = replace(engine, long_prefill_token_threshold=0)
        admit = _returns(None) if part == "admission" else refuse
        yield Scenario(engine=engine, policy=policy, proxy=config).new_policy(names, admit)
