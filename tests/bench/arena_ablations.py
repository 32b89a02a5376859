"""Forebay with one part of its policy switched off each, from outside: the core has no switches.

A part is switched off by another configuration or by replacing the function that decides it while
a run is played; so this needs the plain Python source, not the compiled one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from heapq import heappush
from math import exp, inf, isnan, log
from typing import Any
from unittest.mock import patch

from arena_score import CHAT_MOST, Played, quantile

from forebay.proxy.config.backends import BackendConfig
from forebay.proxy.config.schema import BucketConfig, Config
from forebay.proxy.core.dispatcher import Dispatcher
from forebay.proxy.core.learn.cost import CostModel
from forebay.proxy.core.learn.decay import LOAD_TIME_S
from forebay.proxy.core.model import Action, Request
from forebay.proxy.core.policy.admission import refuse
from forebay.proxy.core.policy.long_prefills import LongPrefills
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import Leaders, QueuedRequest
from forebay.replay.engine import scheduler
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.waiting import WaitingQueue
from forebay.replay.sim.fleet import Policy
from forebay.replay.sim.scenario import Scenario

CORE = "forebay.proxy.core"
FOLLOWING = ("dispatcher", "policy.coalesce", "policy.forecast")  # import `must_follow`
CHAT = BucketConfig(name="chat", up_to=5_000, max_wait=2.0)
DOCUMENT = BucketConfig(name="document", up_to=131_072, max_wait=30.0)
CAP_S = 120.0  # what a refused request counts as in a ratio of percentiles


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
    core = self._dispatcher
    heads = core.queues.heads()
    return core.forecast.next_moment(heads, core.now) if core.queues.waiting else inf


def _only_dispatch(self: Shaper, now: float) -> list[Action]:
    self._dispatcher.pass_time(now)
    return self._dispatcher.dispatch_all(now)


def _earliest(backend: Backend, ready: Sequence[QueuedRequest], now: float) -> QueuedRequest:
    return min(ready, key=lambda w: (w.deadline, w.order))


def _first_come(backend: Backend, ready: Sequence[QueuedRequest], now: float) -> QueuedRequest:
    return min(ready, key=lambda w: w.order)


def _nothing(self: Dispatcher, backend: Backend) -> None:
    backend.review = False


def _returns(value: Any) -> Any:
    return lambda *_, **__: value


KNOWING = "knowing the flag (with --chunk)"
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
        Config(), "warm_or_least_work", ((Dispatcher, "_review", _nothing),),
    ),
    "joining who waits for an engine": (
        Config(), "warm_or_least_work", ((Leaders, "add", _returns(None)),),
    ),
    "going where it is computed by now": (
        Config(), "warm_or_least_work", ((Dispatcher, "_gather", _returns(False)),),
    ),
    "shares of buckets (EDF alone)": (
        Config(), "warm_or_least_work", ((f"{CORE}.dispatcher", "first", _earliest),),
    ),
    "shortest first (EDF in a bucket)": (
        Config(), "warm_or_least_work", ((f"{CORE}.policy.order", "STRETCH", inf),),
    ),
    KNOWING: (Config(), "warm_or_least_work", ()),
    "deadlines (first come)": (
        Config(), "warm_or_least_work", ((f"{CORE}.dispatcher", "first", _first_come),),
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
        Config(), "warm_or_least_work", ((Dispatcher, "_better_here", _returns(None)),),
    ),
    "KV reckoning": (
        Config(), "warm_or_least_work",
        (
            (f"{CORE}.policy.start", "lacks", _returns("")),
            (f"{CORE}.policy.forecast", "kv_wait_s", _returns(0.0)),
        ),
    ),
    "who waits keeps its hit": (
        Config(), "warm_or_least_work", ((f"{CORE}.dispatcher", "loses_hit", _returns(False)),),
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
}  # fmt: skip


@contextmanager
def switched_off(part: str, engine: EngineConfig, names: Sequence[str]) -> Iterator[Policy]:
    """Forebay without the part, while the context lasts."""
    config, policy, patches = WITHOUT[part]
    with ExitStack() as stack:
        for where, name, instead in patches:
            if isinstance(where, str):
                stack.enter_context(patch(f"{where}.{name}", instead))
            else:
                stack.enter_context(patch.object(where, name, instead))
        if part == KNOWING:
            engine = replace(engine, long_prefill_token_threshold=0)
        admit = _returns(None) if part == "admission" else refuse
        yield Scenario(engine=engine, policy=policy, proxy=config).new_policy(names, admit)


class SloQueue(WaitingQueue):
    """Waiting requests by the time until their target, as in the `slo` policy of vllm#53571.

    Its reserve of a tenth of a step is left out. Targets of TTFT: 2 s for chats, else 15 s.
    """

    def __init__(self, policy: str) -> None:
        super().__init__("priority")

    def append(self, request: EngineRequest) -> None:
        self._entered += 1
        due_s = request.arrival_s + (2.0 if request.prompt_tokens <= CHAT_MOST else 15.0)
        heappush(self._heap, (0, due_s, request.id, self._entered, request))


@contextmanager
def slo_order(on: bool) -> Iterator[None]:
    """Let engines that compute each step order their waiting requests by SloQueue."""
    with patch.object(scheduler, "WaitingQueue", SloQueue if on else WaitingQueue):
        yield


GROUPS = {
    "mooncake": ("mooncake",),
    "azure code": ("azure code",),
    "azure conv": ("azure conv",),
    "agents": ("agent",),
    "questions": ("squality", "qmsum"),
    "popular": ("popular",),
    "120k shared": ("120k, shared",),
    "120k unshared": ("120k, unshared",),
    "0.5-1x": ("overload 0.", "overload 1x"),
    "1.5-3x": ("overload 1.5", "overload 2", "overload 3"),
    "mixed": ("mixed fleet",),
}


def show(
    results: Mapping[str, Mapping[str, Played]], whole: str, parts: Sequence[str]
) -> Iterator[str]:
    """Print the worth of each part: the loss without it.

    Points of requests in time, and how many times longer the p99 TTFT of chats and documents is
    (geometric means over the workloads of a group, refused ones taken as CAP_S).
    """
    yield "| without | " + " | ".join(GROUPS) + " | all |"
    yield "| --- |" + " --- |" * (len(GROUPS) + 1)
    for part in parts:
        cells = [
            _cell([r for name, r in results.items() if _belongs(name, told)], part, whole)
            for told in (*GROUPS.values(), ("",))
        ]
        yield f"| {part} | " + " | ".join(cells) + " |"


def _belongs(name: str, told: Sequence[str]) -> bool:
    """Mixed fleets are a group of their own, whatever is played on them."""
    if name.startswith("mixed fleet") and told not in (GROUPS["mixed"], ("",)):
        return False
    return any(part in name for part in told)


def _cell(results: Sequence[Mapping[str, Played]], part: str, whole: str) -> str:
    if not results:
        return "-"
    points, logs = [], dict[bool, list[float]]({True: [], False: []})
    for by_policy in results:
        base, without = by_policy[whole], by_policy[part]
        points.append(100 * (without.good.mean() - base.good.mean()))
        for chat in (True, False):
            chosen = base.chat == chat
            a, b = (quantile(p.ttft_s[chosen], 0.99) for p in (without, base))
            if not isnan(a):
                logs[chat].append(log(min(a, CAP_S) / min(b, CAP_S)))
    ratios = [f"{exp(sum(ls) / len(ls)):.2f}" if ls else "-" for ls in logs.values()]
    return f"{sum(points) / len(points):+.1f}; {ratios[0]}, {ratios[1]}"
