"""Define and simulate one what-if: which engines, how many, and which router in front of them."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import inf
from typing import Any

from forebay.proxy.config.backends import MAX_CONCURRENCY, BackendConfig
from forebay.proxy.config.routes import find_route, route_names
from forebay.proxy.config.schema import Config
from forebay.proxy.core.explain.receipt import Receipts
from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import BackendSpec, Tenant
from forebay.proxy.core.policy.admission import Admit, refuse
from forebay.proxy.core.policy.routing import ROUTES, Route
from forebay.proxy.core.shaper import Shaper
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.limits import FOREBAY_CLASS
from forebay.replay.sim.engine.pools import DecodePool, KvLink
from forebay.replay.sim.engine.served import ServedEngine, can_skip, served_engine
from forebay.replay.sim.engine.several_groups import KvDecides
from forebay.replay.sim.fleet import Fleet, Policy, PooledFleet, SimOutcome
from forebay.replay.sim.routers.all_knowing import AllKnowing
from forebay.replay.sim.routers.base import InTurn
from forebay.replay.sim.routers.models import ROUTER_MODELS
from forebay.replay.sim.turns import WaitingTurns
from forebay.traces.ground.buckets import LengthBucket
from forebay.traces.ground.command_line.garbage import no_collections
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

DIRECT = "direct"
"""Policy name: without a proxy, requests go directly to the engines in turn."""
ALL_KNOWING = "all_knowing"
"""Policy name: a reference that sees the true contents of the engines' caches."""
POLICIES = (*ROUTES, DIRECT, *ROUTER_MODELS, ALL_KNOWING)
"""Policies by name, in addition to plug-ins and files (proxy/config/routes.py)."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fleet to simulate (InputError: it cannot be simulated).

    Attributes:
        engine: options of each engine.
        gpus: number of engines, each on a GPU of its own.
        gpu_mix: names of different GPUs, which the engines get in turn. Empty: all are alike.
        policy: name of a routing policy of the proxy, DIRECT, a model of another router, or
            ALL_KNOWING.
        proxy: the proxy's configuration: buckets, affinity, admission. All engines get the number
            of slots of its first backend.
        tenants: weights and quotas of the trace's tenants, in place of the configuration's.
        exact: compute every engine step by itself: the same times, slowly.
        pools: numbers of engines that compute prompts and that generate. None: all do both.
        kv_link: the link of each engine between the pools.
        explained: keep a receipt of every decision (proxy/core/explain/recorder.py).
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    gpus: int = 2
    policy: str = "warm_or_least_work"
    proxy: Config = field(default_factory=Config)
    exact: bool = False
    tenants: tuple[Tenant, ...] = ()
    explained: bool = False
    gpu_mix: tuple[str, ...] = ()
    pools: tuple[int, int] | None = None
    kv_link: KvLink = field(default_factory=KvLink)

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise InputError(f"--gpus {self.gpus}: give 1 or more")
        if self.gpus < len(self.gpu_mix):
            raise InputError(
                f"--gpu {'+'.join(self.gpu_mix)}: names {len(self.gpu_mix)} GPUs; "
                f"give --gpus {len(self.gpu_mix)} or more"
            )
        check_policy(self.policy)
        if self.policy == ALL_KNOWING:
            self._check_skipping(f"--policy {ALL_KNOWING}")
        if self.pools is not None:
            self._check_pools(self.pools)
        for bucket in self.proxy.buckets:
            if bucket.backends and len(self.proxy.backends) != self.gpus:
                raise InputError(
                    f"--gpus {self.gpus}: bucket {bucket.name} names its backends, of which "
                    f"--config has {len(self.proxy.backends)}; give --gpus "
                    f"{len(self.proxy.backends)}, or leave the bucket's `backends` out"
                )

    def _check_pools(self, pools: tuple[int, int]) -> None:
        words = "+".join(map(str, pools))
        if sum(pools) != self.gpus or min(pools) < 1:
            raise InputError(
                f"--pools {words}: give a number of prefill and of decode engines, together the "
                f"{self.gpus} of --gpus"
            )
        self._check_skipping(f"--pools {words}")
        if any(bucket.backends for bucket in self.proxy.buckets):
            raise InputError(f"--pools {words}: leave out `backends` of the buckets in --config")

    def _check_skipping(self, option: str) -> None:
        """Raise InputError unless `option` can have engines that skip steps."""
        if self.exact or not can_skip(self.engine):
            raise InputError(
                f"{option}: only for engines whose steps can be skipped; leave out --exact, "
                "--speculative-config, --scheduling-policy, --prefill-schedule-interval and "
                "--kv-offloading-size, take --vllm-version 0.26 or newer, and for a model with "
                "sliding windows add --disable-hybrid-kv-cache-manager"
            )

    def buckets(self) -> tuple[LengthBucket, ...]:
        return tuple(LengthBucket(b.name, b.up_to, b.target_s) for b in self.proxy.buckets)

    @property
    def slots(self) -> int:
        """Most requests in flight on an engine: as configured, else as many as it can run."""
        if self.proxy.backends:
            return self.proxy.backends[0].max_concurrency
        return min(MAX_CONCURRENCY, self.engine.seqs)

    def engine_config(self, number: int) -> EngineConfig:
        """Return the options of one engine."""
        if not self.gpu_mix:
            return self.engine
        return replace(self.engine, gpu=self.gpu_mix[number % len(self.gpu_mix)])

    def constants_remarks(self) -> list[str]:
        """Return a remark for each kind of GPU that the constants were not measured on."""
        kinds = range(max(1, len(self.gpu_mix)))
        remarks = [self.engine_config(number).constants_remark() for number in kinds]
        return list(dict.fromkeys(remark for remark in remarks if remark))

    def new_engines(self, *, hopeful: bool = False) -> dict[str, ServedEngine]:
        """Return idle engines by name.

        They have the names of the configured backends where a bucket names some of these, else
        gpu0, gpu1 and so on.
        """
        if any(bucket.backends for bucket in self.proxy.buckets):
            names = [backend.name for backend in self.proxy.backends]
        else:
            names = [f"gpu{number}" for number in range(self.gpus)]
        return {name: self.new_engine(number, hopeful=hopeful) for number, name in enumerate(names)}

    def new_engine(self, number: int = 0, *, hopeful: bool = False) -> ServedEngine:
        """Return an idle engine and its API server.

        Args:
            hopeful: the caller starts over where the engine raises `KvDecides`.
        """
        config = self.engine_config(number)
        return served_engine(config, exact=self.exact, hopeful=hopeful)

    def new_fleet(
        self,
        engines: Mapping[str, ServedEngine],
        on_end: Callable[[SimOutcome], None] | None = None,
    ) -> Fleet:
        """Return the policy in front of `engines`, the last of which are the decode pool."""
        if self.pools is None:
            return Fleet(self.new_policy(list(engines)), engines, on_end=on_end)
        prefilling = list(engines)[: self.pools[0]]
        pool = DecodePool(
            {name: engine for name, engine in engines.items() if name not in prefilling},
            self.kv_link,
            self.engine.model_spec.kv_bytes_per_token,
        )
        policy = self.new_policy(prefilling)
        return PooledFleet(
            policy, {name: engines[name] for name in prefilling}, pool, on_end=on_end
        )

    def new_policy(self, names: Sequence[str], admit: Admit = refuse) -> Policy:
        if self.policy == DIRECT:
            return InTurn()
        if self.policy == ALL_KNOWING:
            return AllKnowing()
        if self.policy in ROUTER_MODELS:
            return ROUTER_MODELS[self.policy][0]()
        options = self.proxy.shaper_options()
        options["route"] = route_of(self.policy)
        options["tenants"] = self.tenants or options["tenants"]
        server = BackendConfig(
            url="http://simulated",
            long_prefill_token_threshold=self.engine.long_prefill_token_threshold or None,
            scheduler="forebay" if self.engine.limits().pause_s else "vllm",
        )
        ordered = self.engine.scheduling_policy == "priority"
        backends = [
            BackendSpec(name, self.slots, inf, server.chunk_tokens, ordered, server.scheduler)
            for name in names
        ]
        recorder = DecisionRecorder(sys.maxsize) if self.explained else None
        buckets = self.proxy.core_buckets()
        return Shaper(backends, buckets, **options, admit=admit, recorder=recorder)


def flags_of(proxy: Config) -> dict[str, Any]:
    """Return the options of `EngineConfig` that a configuration states of its first backend."""
    if not proxy.backends:
        return {}
    backend = proxy.backends[0]
    flags: dict[str, Any] = {}
    if backend.long_prefill_token_threshold:
        flags["long_prefill_token_threshold"] = backend.long_prefill_token_threshold
    if backend.scheduler == "forebay":
        flags["scheduler_cls"] = FOREBAY_CLASS
    return flags


def check_policy(name: str) -> None:
    """Raise InputError if there is no policy of that name."""
    if name not in POLICIES:
        route_of(name)


def route_of(policy: str) -> Route:
    """Return a routing policy of the proxy, a plug-in or a file (InputError: no such policy)."""
    try:
        route = find_route(policy)
    except InputError as error:
        raise InputError(f"--policy {error}") from error
    if route is None:
        names = list(dict.fromkeys((*POLICIES, *route_names())))
        # Without a proxy, requests go to the engines in turn.
        turns = [DIRECT] if policy.replace("-", "_") == "round_robin" else []
        close = turns or get_close_matches(policy, names, n=1)
        raise InputError(
            f"--policy {policy}: no such policy; "
            + (f"did you mean {close[0]}? One of: " if close else "")
            + f"{', '.join(names)}, or a function in a file: FILE.py:NAME"
        )
    return route


def parse_pools(text: str) -> tuple[int, int] | None:
    """Read `1+3`, one prefill and three decode engines, or `none` (InputError: another form)."""
    if text == "none":
        return None
    parts = text.split("+")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--pools {text}: give PREFILL+DECODE engines, such as 1+3, or none")
    return int(parts[0]), int(parts[1])


def split_gpus(text: str) -> tuple[str, tuple[str, ...]]:
    """Split `h200+h100+l40s` into its first GPU and the mix, which is empty for one GPU."""
    names = tuple(text.split("+"))
    return names[0], names if len(names) > 1 else ()


@dataclass(frozen=True, slots=True)
class Simulated:
    """A finished simulation.

    Attributes:
        outcomes: results of all requests, in order of arrival.
        busy: share of the time until the last answer in which each engine computed.
        cpu_s: processor seconds of the simulation, without loading the trace.
        receipts: receipts of every request, if the scenario is `explained`.
        waited: turns waited for answers, so that arrivals depend on the policy.
    """

    scenario: Scenario
    outcomes: Sequence[SimOutcome]
    busy: Sequence[float]
    preemptions: int
    cpu_s: float
    receipts: Receipts | None = None
    waited: bool = False


Enough = Callable[[SimOutcome], bool]
"""Takes each outcome when it has ended. True ends the simulation."""


class _Decided(Exception):
    """The question is answered before the trace ends."""


def simulate(
    trace: Sequence[TraceRequest],
    scenario: Scenario,
    new_enough: Callable[[], Enough] | None = None,
    new_turns: Callable[[], WaitingTurns] | None = None,
) -> Simulated:
    """Play `trace`, in order of arrival. Equal input gives equal output to the bit.

    Args:
        new_enough: makes a function that may end the simulation, with the requests that have
            arrived by then.
        new_turns: makes the requests of `trace` that wait for answers. Outcomes are then in order
            of arrival, which the answers decide. None: all come at their time in the trace.

    Raises:
        InputError: no engine could ever hold a request.
    """
    check_lengths(trace, scenario.engine.context, ordered=new_turns is None)

    def play(*, hopeful: bool) -> Simulated:
        enough, turns = new_enough and new_enough(), new_turns and new_turns()
        return _simulate(trace, scenario, enough, turns, hopeful=hopeful)

    try:
        return play(hopeful=True)
    except KvDecides:
        return play(hopeful=False)


def _simulate(
    trace: Sequence[TraceRequest],
    scenario: Scenario,
    enough: Enough | None,
    turns: WaitingTurns | None,
    *,
    hopeful: bool,
) -> Simulated:
    engines, ended = scenario.new_engines(hopeful=hopeful), list[SimOutcome]()

    def note(outcome: SimOutcome) -> None:
        ended.append(outcome)
        if enough is not None and enough(outcome):
            raise _Decided

    fleet = scenario.new_fleet(engines, None if enough is None else note)
    policy = fleet.policy
    with no_collections():
        started = time.process_time()
        try:
            outcomes = fleet.run(trace) if turns is None else fleet.run_turns(turns)
        except _Decided:
            outcomes = fleet.unfinished()
        cpu_s = time.process_time() - started
    if enough is not None:
        places = {row.id: place for place, row in enumerate(trace)}
        outcomes = sorted([*ended, *outcomes], key=lambda outcome: places[outcome.request.id])
    end_s = max((o.finished_s or 0.0 for o in outcomes), default=0.0)
    busy = [engine.busy_s / end_s if end_s else 0.0 for engine in engines.values()]
    preemptions = sum(engine.preemptions for engine in engines.values())
    receipts = None
    if scenario.explained and isinstance(policy, Shaper):
        receipts = _receipts(policy, outcomes)
    return Simulated(
        scenario, outcomes, busy, preemptions, cpu_s, receipts, waited=turns is not None
    )


def _receipts(policy: Shaper, outcomes: Sequence[SimOutcome]) -> Receipts:
    policy.settle(inf)
    receipts = policy.recorder.receipts
    for outcome in outcomes:  # the fleet reports only usage that the policy did not expect
        receipt = receipts.find(outcome.request.id)
        if receipt is not None and outcome.served is not None:
            receipt.cached_tokens = outcome.cached_tokens
            receipt.output_tokens = outcome.request.output_tokens
    return receipts


def check_lengths(trace: Sequence[TraceRequest], context: int, *, ordered: bool = True) -> None:
    """Raise InputError for a row beyond the model's context or, if `ordered`, out of order."""
    before = -inf
    for row in trace:
        if row.input_tokens + row.output_tokens > context:
            raise InputError(
                f"request {row.id!r} needs {row.input_tokens} + {row.output_tokens} tokens, the "
                f"model's context is {context}; use --too-long truncate or --too-long drop"
            )
        if ordered and row.arrival_s < before:
            raise InputError(
                f"request {row.id!r} arrives before the row above it; sort the rows by arrival"
            )
        before = row.arrival_s
