"""Overload in virtual time: workloads, measures and the scenarios behind docs/research/goals.md.

Two engines (Llama-3-8B on H200) unless said otherwise. Load is in shares of the engines'
throughput when the whole trace is queued at once.
"""

import random
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, cast

from forebay.proxy.config.schema import Config
from forebay.proxy.core.model import Action, Reject, ServiceClass, Tenant
from forebay.proxy.core.shaper import Shaper
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.capacity import capacity_per_s
from forebay.replay.sim.engine.served import ServedEngine
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.scenario import Scenario
from forebay.traces.ground.schema import TraceRequest

ENGINE = EngineConfig()
CHAT_S, DOCUMENT_S = 2.0, 30.0  # the longest wait of each bucket; also the target of TTFT
LATE = 1.2  # a first token later than this times its target is late


def chat(rng: random.Random, number: int, at: float, tenant: str | None = None) -> TraceRequest:
    """A prompt of about 3,000 tokens that shares nothing, and an answer of about 30."""
    return _unshared(number, at, rng.randint(1_500, 4_500), rng.randint(10, 50), tenant)


def document(rng: random.Random, number: int, at: float, tenant: str | None = None) -> TraceRequest:
    """A prompt of 10,000 to 40,000 tokens. One in three was seen before."""
    prompt, output = rng.randint(10_000, 40_000), rng.randint(10, 50)
    first = 10**9 * (1 + (rng.randrange(30) if rng.random() < 1 / 3 else 1_000 + number))
    ids = tuple(range(first, first + -(-prompt // 512)))
    return TraceRequest(str(number), at, prompt, output, ids, tenant=tenant)


def mix(rng: random.Random, number: int, at: float, tenant: str | None = None) -> TraceRequest:
    """Nine chats to a document: half of the work each."""
    make = document if rng.random() < 0.1 else chat
    return make(rng, number, at, tenant)


def long_answer(
    rng: random.Random, number: int, at: float, tenant: str | None = None
) -> TraceRequest:
    """A prompt of about 1,000 tokens, and an answer of 100 to 400: slots are short, not compute."""
    return _unshared(number, at, rng.randint(500, 2_000), rng.randint(100, 400), tenant)


def _unshared(number: int, at: float, prompt: int, output: int, tenant: str | None) -> TraceRequest:
    first = 10**12 + 16 * number
    ids = tuple(range(first, first + -(-prompt // 512)))
    return TraceRequest(str(number), at, prompt, output, ids, tenant=tenant)


Make = Callable[[random.Random, int, float, str | None], TraceRequest]


def capacity(make: Make, engines: int = 2, engine: EngineConfig = ENGINE) -> float:
    """Requests a second that the engines complete at most."""
    rng = random.Random(10**6)
    return capacity_per_s([make(rng, i, 0.0, None) for i in range(600)], engine, engines)


def poisson(
    make: Make,
    pieces: Iterable[tuple[float, float]],
    seed: int,
    tenant: str | None = None,
    first: int = 0,
) -> list[TraceRequest]:
    """Random arrivals: `pieces` are (seconds, requests a second), one after the other."""
    rng, rows, start = random.Random(seed), list[TraceRequest](), 0.0
    for seconds, rate in pieces:
        at = start + rng.expovariate(rate)
        while at < start + seconds:
            rows.append(make(rng, first + len(rows), at, tenant))
            at += rng.expovariate(rate)
        start += seconds
    return rows


def merged(*traces: Sequence[TraceRequest]) -> list[TraceRequest]:
    rows = sorted((row for trace in traces for row in trace), key=lambda row: row.arrival_s)
    return [replace(row, id=str(number)) for number, row in enumerate(rows)]


class Slowed:
    """An engine whose clock runs at another speed: `speed` 0.5 takes twice as long."""

    def __init__(self, engine: ServedEngine, speed: float) -> None:
        self._engine, self._speed = engine, speed

    @property
    def kv_tokens(self) -> int:
        return self._engine.kv_tokens

    @property
    def busy_s(self) -> float:
        return self._engine.busy_s / self._speed

    @property
    def preemptions(self) -> int:
        return self._engine.preemptions

    def send(self, request: Any, now: float) -> None:
        self._engine.send(request, now * self._speed)

    def next_at(self) -> float:
        return self._engine.next_at() / self._speed

    def advance(self, now: float) -> Any:
        first, done = self._engine.advance(now * self._speed)
        # Outcomes are read in the fleet's time. The engine needs its own until the request ends.
        for request in done:
            request.first_token_s /= self._speed
            request.finished_s /= self._speed
        return first, done


@dataclass(frozen=True)
class Played:
    shaper: Shaper
    outcomes: list[SimOutcome]

    def between(self, start: float, end: float) -> "Played":
        chosen = [o for o in self.outcomes if start <= o.request.arrival_s < end]
        return Played(self.shaper, chosen)

    def of(self, tenant: str) -> "Played":
        return Played(self.shaper, [o for o in self.outcomes if o.request.tenant == tenant])

    @property
    def good(self) -> list[SimOutcome]:
        """First token in time."""
        return [o for o in self.outcomes if _in_time(o)]

    def good_s(self) -> float:
        """Work in time: good answers weighed by their prefill alone on an engine, seconds."""
        return sum(work_s(o) for o in self.good)

    def served_s(self) -> float:
        return sum(work_s(o) for o in self.outcomes if o.served)

    def wasted(self) -> float:
        """Share of the prefill work that went into answers that came late."""
        served = self.served_s()
        late = sum(work_s(o) for o in self.outcomes if o.served and not _in_time(o))
        return late / served if served else 0.0

    def late(self) -> float:
        """Share of the admitted requests that were answered late or rejected from the queue."""
        taken = [o for o in self.outcomes if o.served or (o.reject and o.reject.queued_s > 0)]
        late = [o for o in taken if o.ttft_s is None or o.ttft_s > LATE * target_s(o)]
        return len(late) / len(taken) if taken else 0.0

    def refused(self) -> float:
        return sum(o.reject is not None for o in self.outcomes) / max(1, len(self.outcomes))

    def ttft_s(self, quantile: float) -> float:
        values = sorted(o.ttft_s for o in self.outcomes if o.ttft_s is not None)
        return values[min(len(values) - 1, int(quantile * len(values)))]


def target_s(outcome: SimOutcome) -> float:
    return CHAT_S if outcome.request.input_tokens <= 5_000 else DOCUMENT_S


def work_s(outcome: SimOutcome) -> float:
    """Prefill of the request without its cached tokens, by the prior of an 8B on an H200."""
    prompt = outcome.request.input_tokens
    uncached = prompt - outcome.cached_tokens
    return 0.005 + 2.2e-5 * uncached + 1e-9 * uncached * (prompt - uncached / 2)


def _in_time(outcome: SimOutcome) -> bool:
    return outcome.ttft_s is not None and outcome.ttft_s <= LATE * target_s(outcome)


def play(
    trace: Iterable[TraceRequest],
    *,
    record: Callable[[float, Action], None] | None = None,
    speeds: Sequence[float] = (1.0, 1.0),
    tenants: Sequence[Tenant] = (),
    bias: float = 1.0,
    config: Config | None = None,
    engine: EngineConfig = ENGINE,
) -> Played:
    """The trace through the shaper.

    Args:
        record: takes each decision and its time.
        bias: how many times too high it starts to predict.
    """
    names = [f"gpu{number}" for number in range(len(speeds))]
    scenario = Scenario(engine=engine, proxy=config or Config(), tenants=tuple(tenants))
    shaper = scenario.new_policy(names)
    assert isinstance(shaper, Shaper)
    for backend in shaper.backends.values():
        backend.cost.scale = (bias, bias, bias)
        backend.cost._settle()
    engines = {
        name: scenario.new_engine() if speed == 1.0 else Slowed(scenario.new_engine(), speed)
        for name, speed in zip(names, speeds, strict=True)
    }
    fleet = Fleet(shaper, cast(Any, engines), record)  # what is compiled must not be subclassed
    return Played(shaper, fleet.run(trace))


def classed(rows: Iterable[TraceRequest], service_class: ServiceClass) -> list[TraceRequest]:
    return [replace(row, service_class=service_class) for row in rows]


def come_back(
    trace: Sequence[TraceRequest], seed: int, share: float = 0.1, tries: int = 1
) -> Played:
    """Play the trace. This share of the rejected clients come back, each time at its Retry-After.

    Args:
        tries: how often a client comes back at most.

    Returns all requests. The id of a request that comes back begins with `again-`.
    """
    rng, back = random.Random(seed), list[TraceRequest]()
    rows, tried = {row.id: row for row in trace}, dict[str, int]()

    def rejected(now: float, action: Action) -> None:
        if not isinstance(action, Reject):
            return
        row = rows[action.request.id]
        if row.id not in tried:
            tried[row.id] = 0 if rng.random() < share else tries
        if tried[row.id] < tries:
            again = replace(row, id=f"again-{row.id}", arrival_s=now + action.retry_after_s)
            rows[again.id], tried[again.id] = again, tried[row.id] + 1
            insort(back, again, key=lambda row: row.arrival_s)

    def arrivals() -> Iterator[TraceRequest]:
        for row in trace:
            while back and back[0].arrival_s <= row.arrival_s:
                yield back.pop(0)
            yield row
        while back:
            yield back.pop(0)

    return play(arrivals(), record=rejected)


def is_back(outcome: SimOutcome) -> bool:
    return outcome.request.id.startswith("again-")


def mean(values: Iterable[float]) -> float:
    return fmean(list(values))


# The goals: each returns figures of one seed.


def curve(
    factors: Sequence[float], seconds: float, seed: int, make: Make = mix
) -> dict[float, Played]:
    """Load at each of these shares of capacity."""
    rate = capacity(make)
    return {f: play(poisson(make, [(seconds, f * rate)], seed)) for f in factors}


def step(make: Make, deadline_s: float, seed: int, spike_s: float = 20.0) -> tuple[float, float]:
    """0.5x, then 5x, then 0.5x: the p95 of TTFT from two deadlines after the spike on, seconds.

    And the same requests' p95 without the spike.
    """
    rate, before_s, after_s = capacity(make), 10.0, 2 * deadline_s + 30.0
    end = before_s + spike_s
    spike = poisson(make, [(before_s, 0.5 * rate), (spike_s, 5 * rate)], seed + 1)
    calm = [
        replace(row, arrival_s=row.arrival_s + end)
        for row in poisson(make, [(after_s, 0.5 * rate)], seed, None, 10**6)
    ]
    both, alone = (
        play(trace).between(end + 2 * deadline_s, end + after_s)
        for trace in (merged(spike, calm), calm)
    )
    return both.ttft_s(0.95), alone.ttft_s(0.95)


def shares(
    offered: Sequence[float],
    load: float,
    seconds: float,
    seed: int,
    make: Make = chat,
    through: Callable[[Sequence[TraceRequest]], Played] | None = None,
) -> dict[str, float]:
    """Seconds of work that each tenant got, as a multiple of its fair share.

    `through`: plays the trace, with one shaper by default.
    """
    rate = load * capacity(make)
    total = sum(offered)
    traces = [
        poisson(make, [(seconds, rate * part / total)], seed + 100 * i, f"t{i}", 10**6 * i)
        for i, part in enumerate(offered)
    ]
    played = (through or play)(merged(*traces))
    warm = played.between(seconds / 6, seconds)
    names = [f"t{i}" for i in range(len(offered))]
    got = {name: warm.of(name).served_s() for name in names}
    asked_s = {name: sum(map(work_s, warm.of(name).outcomes)) for name in names}
    fair = _water_filled(asked_s, sum(got.values()))
    return {name: got[name] / fair[name] for name in names}


def _water_filled(asked_s: dict[str, float], total: float) -> dict[str, float]:
    """Equal parts, but no tenant gets more than its demand."""
    fair = dict[str, float]()
    for name in sorted(asked_s, key=lambda n: asked_s[n]):
        fair[name] = min(asked_s[name], total / (len(asked_s) - len(fair)))
        total -= fair[name]
    return fair


def light_beside_heavy(
    seconds: float, seed: int, engine: EngineConfig = ENGINE
) -> tuple[float, float]:
    """p99 of a light tenant's TTFT alone, and while another offers ten times its fair share."""
    rate = capacity(chat)
    light = poisson(chat, [(seconds, 0.2 * rate)], seed, "light")
    heavy = poisson(chat, [(seconds, 5.0 * rate)], seed + 1, "heavy", 10**6)
    alone, beside = play(light, engine=engine), play(merged(light, heavy), engine=engine)
    return alone.of("light").ttft_s(0.99), beside.of("light").ttft_s(0.99)
