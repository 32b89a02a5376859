"""One what-if: which engines, how many, and what stands in front of them."""

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from forebay.proxy.config.schema import MAX_CONCURRENCY, Config
from forebay.proxy.core.explain.receipt import Receipts
from forebay.proxy.core.explain.recorder import Recorder
from forebay.proxy.core.model import BackendSpec, Tenant
from forebay.proxy.core.policy.admission import Admit, refuse
from forebay.proxy.core.policy.routing import ROUTES
from forebay.proxy.core.shaper import Shaper
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.scheduler import SchedulerLimits
from forebay.replay.sim.all_knowing import AllKnowing
from forebay.replay.sim.fleet import Engine, Fleet, Outcome, Policy
from forebay.replay.sim.in_turn import InTurn
from forebay.replay.sim.peers import PEERS
from forebay.replay.sim.skipping import SkippingEngine
from forebay.replay.sim.stepping import SteppingEngine
from forebay.traces.buckets import Bucket
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest

DIRECT = "direct"
"""Policy name: no proxy; requests go straight to the engines in turn."""
ALL_KNOWING = "all_knowing"
"""Policy name: a reference that looks into the engines' caches."""
POLICIES = (*ROUTES, DIRECT, *PEERS, ALL_KNOWING)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated; raises InputError for what cannot be.

    Attributes:
        engine: options of each engine.
        gpus: how many engines, each on a GPU of its own.
        policy: name of a routing policy of the proxy, DIRECT, a model of another router, or
            ALL_KNOWING.
        proxy: the proxy's configuration: buckets, affinity, admission. Of its backends only the
            first counts: by its number of slots and the pieces that prompts are sent in.
        tenants: weights and quotas of the trace's tenants, in place of the configuration's.
        exact: compute every engine step one by one; the same times, slowly.
        explained: keep a receipt of every decision (proxy/core/explain/recorder.py).
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    gpus: int = 2
    policy: str = "warm_or_least_work"
    proxy: Config = field(default_factory=Config)
    exact: bool = False
    tenants: tuple[Tenant, ...] = ()
    explained: bool = False

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise InputError(f"--gpus {self.gpus}: give 1 or more")
        if self.policy not in POLICIES:
            raise InputError(f"--policy {self.policy}: no such policy; {', '.join(POLICIES)}")
        for bucket in self.proxy.buckets:
            if bucket.backends:
                raise InputError(
                    f"--config: bucket {bucket.name} names its backends; a simulated fleet is of "
                    "any size, so leave `backends` out"
                )

    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(Bucket(b.name, b.up_to) for b in self.proxy.buckets)

    @property
    def slots(self) -> int:
        """Requests that the proxy lets run on an engine: as many as it can, unless configured."""
        if self.proxy.backends:
            return self.proxy.backends[0].max_concurrency
        return min(MAX_CONCURRENCY, self.engine.seqs)

    def new_engine(self) -> Engine:
        if self.exact or not can_skip(self.engine):
            return SteppingEngine(self.engine)
        return SkippingEngine(self.engine)

    def new_policy(self, names: Sequence[str], admit: Admit = refuse) -> Policy:
        if self.policy == DIRECT:
            return InTurn()
        if self.policy == ALL_KNOWING:
            return AllKnowing()
        if self.policy in PEERS:
            return PEERS[self.policy][0]()
        options = self.proxy.shaper_options()
        options["route"] = ROUTES[self.policy]
        options["tenants"] = self.tenants or options["tenants"]
        chunk_tokens = self.engine.long_prefill_token_threshold or inf
        first = self.proxy.backends[0] if self.proxy.backends else None
        piece_s = (first.prefill_piece if first else None) or inf
        backends = [BackendSpec(name, self.slots, inf, chunk_tokens, piece_s) for name in names]
        recorder = Recorder(sys.maxsize) if self.explained else None
        buckets = self.proxy.core_buckets()
        return Shaper(backends, buckets, **options, admit=admit, recorder=recorder)


def can_skip(config: EngineConfig) -> bool:
    """Whether `SkippingEngine` knows the rules of this engine; else every step is computed."""
    limits = config.limits()
    known = SchedulerLimits(
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        enable_prefix_caching=limits.enable_prefix_caching,
        block_size=limits.block_size,
        watermark=limits.watermark,
    )
    fronted = config.release.uncached_blocks_first
    return limits == known and fronted and not config.async_scheduling


@dataclass(frozen=True, slots=True)
class Simulated:
    """A finished simulation.

    Attributes:
        outcomes: in order of arrival.
        busy: share of the time until the last answer that each engine computed.
        cpu_s: processor seconds the simulation took, loading the trace not counted.
        receipts: of every request, if the scenario is `explained`.
    """

    scenario: Scenario
    outcomes: Sequence[Outcome]
    busy: Sequence[float]
    preemptions: int
    cpu_s: float
    receipts: Receipts | None = None


def simulate(trace: Sequence[TraceRequest], scenario: Scenario) -> Simulated:
    """Play `trace`, in order of arrival; equal input gives equal output to the bit.

    Raises InputError for a request that no engine could ever hold.
    """
    check_lengths(trace, scenario.engine.context)
    engines = {f"gpu{number}": scenario.new_engine() for number in range(scenario.gpus)}
    policy = scenario.new_policy(list(engines))
    fleet = Fleet(policy, engines)
    # Nothing the simulation makes is cyclic, and looking for cycles costs a fifth of the time.
    collecting = gc.isenabled()
    gc.disable()
    started = time.process_time()
    try:
        outcomes = fleet.run(trace)
    finally:
        if collecting:
            gc.enable()
    cpu_s = time.process_time() - started
    end_s = max((o.finished_s or 0.0 for o in outcomes), default=0.0)
    busy = [engine.busy_s / end_s if end_s else 0.0 for engine in engines.values()]
    preemptions = sum(engine.preemptions for engine in engines.values())
    receipts = _receipts(policy, outcomes) if isinstance(policy, Shaper) else None
    return Simulated(scenario, outcomes, busy, preemptions, cpu_s, receipts)


def _receipts(policy: Shaper, outcomes: Sequence[Outcome]) -> Receipts | None:
    if policy.recorder is None:
        return None
    policy.settle(inf)
    receipts = policy.recorder.receipts
    for outcome in outcomes:  # the fleet tells the policy only what it did not expect
        receipt = receipts.find(outcome.request.id)
        if receipt is not None and outcome.served is not None:
            receipt.cached_tokens = outcome.cached_tokens
            receipt.output_tokens = outcome.request.output_tokens
    return receipts


def check_lengths(trace: Sequence[TraceRequest], context: int) -> None:
    """Raise InputError for a row without lengths or beyond the model's context."""
    before = -inf
    for row in trace:
        if row.input_tokens + row.output_tokens > context:
            raise InputError(
                f"request {row.id!r} needs {row.input_tokens} + {row.output_tokens} tokens, the "
                f"model's context is {context}; use --too-long truncate or --too-long drop"
            )
        if row.arrival_s < before:
            raise InputError(f"request {row.id!r} arrives before the one in front of it; sort them")
        before = row.arrival_s
