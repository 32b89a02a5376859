"""Make the traffic of a side-by-side run: cut a source to length, send it at a share of capacity.

Every trace is cut so that its arrivals last `window_s` seconds at the wanted share of capacity,
capacity being what the engines complete a second when the whole cut is there at once
(`replay/sim/capacity.py`). Its text is the same in every process.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forebay.replay.engine.config import EngineConfig
from forebay.replay.plan.source import fit
from forebay.replay.sim.capacity import capacity_per_s
from forebay.traces.edit.sharing import IdealCache
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.trace_line import row_bytes

SLO = ",".join(f"{bucket.name}.ttft={bucket.target_s:g}s" for bucket in DEFAULT_BUCKETS)
PROBED = 400  # requests from which the length of the cut is guessed
Source = Callable[[int], Sequence[TraceRequest]]


@dataclass(frozen=True, slots=True)
class Course:
    """One workload.

    Attributes:
        source: the requests for a seed.
        load: share of capacity.
        window_s: how long arrivals go on.
        time_scale: the most it may be run at: many small streams cost the machine more.
        chunk: --long-prefill-token-threshold of the engines, tokens; 0: they run without it.
        traffic_of: the course whose requests, times and load these are; empty: its own.
    """

    name: str
    about: str
    source: Source
    load: float = 0.8
    window_s: float = 60.0
    slo: str = SLO
    time_scale: float = 8.0
    chunk: int = 0
    traffic_of: str = ""

    @property
    def traffic_name(self) -> str:
        """Name of the traffic; it salts the text, so twins send equal bytes."""
        return self.traffic_of or self.name


@dataclass(frozen=True, slots=True)
class Traffic:
    """A course for one seed, ready to be sent; `context` is the most tokens of a request."""

    name: str
    requests: tuple[TraceRequest, ...]
    slo: str
    context: int
    capacity_per_s: float

    @property
    def sha256(self) -> str:
        """The first 12 hex digits, of the rows as Forebay's own format writes them."""
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(row_bytes(request))
        return digest.hexdigest()[:12]

    @property
    def ideal_hit_ratio(self) -> float:
        """Hit ratio of one infinite cache that holds every prompt once it was sent."""
        cache = IdealCache()
        hits = sum(cache.look_up(request).hit_tokens for request in self.requests)
        return hits / sum(request.input_tokens for request in self.requests)


def prepare(course: Course, seed: int, model: str, gpu: str, engines: int) -> Traffic:
    """Return `course` for simulated engines.

    Capacity is that of engines without flags, so that courses that differ in `chunk` alone get the
    same requests at the same times.
    """
    config = EngineConfig(model=model, gpu=gpu)
    rows = [_fitting(row, config.context) for row in course.source(seed)]
    name = course.traffic_name
    cut = rows[: _count(course, capacity_per_s(rows[:PROBED], config, engines))]
    capacity = capacity_per_s(cut, config, engines)
    timed = at_rate(cut, course.load * capacity)
    return Traffic(name, timed, course.slo, config.context, capacity)


def at_rate(rows: Sequence[TraceRequest], rate_per_s: float) -> tuple[TraceRequest, ...]:
    """The rows with their times divided so that they come at `rate_per_s` on average."""
    if len(rows) < 2 or rows[-1].arrival_s <= rows[0].arrival_s:
        raise InputError("a trace that is to be sent at a rate needs two arrivals at least")
    offered = (len(rows) - 1) / (rows[-1].arrival_s - rows[0].arrival_s)
    return _from_zero(rows, rate_per_s / offered)


def _from_zero(rows: Sequence[TraceRequest], speed: float) -> tuple[TraceRequest, ...]:
    first_s = rows[0].arrival_s
    return tuple(
        replace(row, arrival_s=round((row.arrival_s - first_s) / speed, 6)) for row in rows
    )


def _count(course: Course, capacity: float) -> int:
    return max(20, round(course.load * capacity * course.window_s))


def _fitting(row: TraceRequest, context: int) -> TraceRequest:
    """Shorten the row as `forebay replay --too-long truncate` would, so that both agree."""
    return fit(row, context - 64, "truncate") or row  # a chat's own tokens come on top
