"""The proxy of the study `flood`: its configuration and its capacity."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import sqrt

from forebay.analysis.experiments.one_load import middle_rate
from forebay.analysis.experiments.systems import Way
from forebay.analysis.statistics.knee import FOLLOWED
from forebay.proxy.config.schema import Config
from forebay.replay.engine.config import EngineConfig
from forebay.replay.plan.slo import Slo
from forebay.replay.sim.capacity import drain_s
from forebay.traces.buckets import DEFAULT_BUCKETS, bucket_of
from forebay.traces.schema import TraceRequest

UNBOUNDED, FOREVER_S = 1_000_000, 3600.0
LEAST_WAIT_SHARE = 0.1  # share of a target: max_wait if the longest prefill takes nearly all of it
SEARCHED, SEARCH_STEPS = (0.5, 4.0), 7  # multiples of the engines' capacity, found within 2 %


def max_waits_s(
    slos: Sequence[Slo], rows: Sequence[TraceRequest], engine: EngineConfig
) -> dict[str, float]:
    """Return the longest wait of each bucket with which admitted requests are in time.

    The prefill of the bucket's longest prompt, cold and alone, must fit into the target too.
    Buckets without a target are left out.
    """
    waits = {}
    for name in (bucket.name for bucket in DEFAULT_BUCKETS):
        targets = [s.limit_s for s in slos if s.metric == "ttft" and s.bucket in (None, name)]
        of = [row for row in rows if bucket_of(row.input_tokens) == name]
        if not targets or not of:
            continue
        longest = replace(max(of, key=lambda row: row.input_tokens), output_tokens=1)
        left_s = min(targets) - drain_s([longest], engine)
        waits[name] = round(max(LEAST_WAIT_SHARE * min(targets), left_s), 3)
    return waits


def config_with(max_wait_s: Mapping[str, float]) -> Config:
    """The default configuration with these waits, by bucket."""
    return _with_buckets({name: {"max_wait": wait_s} for name, wait_s in max_wait_s.items()})


def patient_config() -> Config:
    """The default configuration without limits: every request waits, none is rejected."""
    limits = {"max_queue": UNBOUNDED, "max_wait": FOREVER_S, "target": FOREVER_S}
    return _with_buckets({bucket.name: limits for bucket in Config().buckets})


def _with_buckets(changes: Mapping[str, Mapping[str, float]]) -> Config:
    """The default configuration with changes by bucket."""
    buckets = Config().buckets
    return Config(
        buckets=tuple(bucket.model_copy(update=changes.get(bucket.name, {})) for bucket in buckets)
    )


async def highest_followed(
    way: Way, limit: float, make: Callable[[float], Sequence[TraceRequest]]
) -> float | None:
    """Return the highest rate of which 95 % is completed while it lasts, or None.

    Args:
        limit: capacity of the engines without the proxy. The search is around it.
        make: makes the requests of a rate.
    """
    low, high = (factor * limit for factor in SEARCHED)
    best = None
    for _ in range(SEARCH_STEPS):
        rate = sqrt(low * high)
        (load,) = await way.play("capacity", make(rate))
        done = [reply.done_s for reply in load.seen if reply.done_s is not None]
        if middle_rate(done) >= FOLLOWED * middle_rate([reply.due_s for reply in load.seen]):
            low = best = rate
        else:
            high = rate
    return best
