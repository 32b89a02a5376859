"""The ways from users to engines that a study compares, and the results of a load on each.

`sim:MODEL@GPU` has two ways: the engines in round robin, and the proxy in front of the same
engines, both in virtual time. Each URL is one more way. A load consists of phases. A phase begins
when the previous phase has ended, with the prefix cache that it left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from forebay.analysis.experiments.gauges import GaugeSample, Pool
from forebay.analysis.experiments.target import About, StudyFailed
from forebay.replay.sim.closed_loop import closed_loop
from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.served import ServedEngine
from forebay.replay.sim.engine.stepping import SteppingEngine
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.scenario import DIRECT, Scenario, check_lengths
from forebay.traces.ground.schema import TraceRequest

IN_TURN, PROXY = "round robin", "proxy"
APART_S = 600.0  # between the starts of phases; waiting costs nothing in virtual time


@dataclass(frozen=True, slots=True)
class Seen:
    """The measurements of one request, None where an event never happened.

    Attributes:
        outcome: ok, rejected or failed, with the `reason`.
        due_s, done_s: seconds from the start of its phase.
        ttft_s, e2e_s: seconds from when the request was due.
        waited_s: seconds until a rejected request was rejected.
    """

    request: TraceRequest
    outcome: str
    reason: str | None
    due_s: float
    done_s: float | None
    ttft_s: float | None
    e2e_s: float | None
    tpot_s: float | None
    stall_s: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    backend: str | None
    waited_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


@dataclass(frozen=True, slots=True)
class PlayedLoad:
    """The measurements of one phase. `verdict` and `reason` are a replay's."""

    seen: Sequence[Seen]
    samples: Sequence[GaugeSample] = ()
    verdict: str = "valid"
    reason: str = "simulated: every arrival is at its time"

    def count(self, outcome: str) -> int:
        """Return the number of requests with this outcome."""
        return sum(reply.outcome == outcome for reply in self.seen)

    def checked(self, way: str) -> "PlayedLoad":
        """Return self. Raises StudyFailed if no request was answered."""
        if not any(reply.ok for reply in self.seen):
            why = ", ".join(sorted({reply.reason or reply.outcome for reply in self.seen}))
            raise StudyFailed(f"{way}: none of {len(self.seen)} requests was answered ({why})")
        return self


class Way(Protocol):
    """One way from users to engines. `pools` are the reported KV caches, empty if unknown."""

    @property
    def name(self) -> str: ...
    @property
    def about(self) -> About: ...
    @property
    def max_num_seqs(self) -> int | None: ...
    @property
    def pools(self) -> Sequence[Pool]: ...

    async def play(self, label: str, *phases: Sequence[TraceRequest]) -> list[PlayedLoad]:
        """Send every request when it is due in its phase. Raises StudyFailed."""
        ...

    async def closed(self, label: str, rows: Sequence[TraceRequest], at_once: int) -> PlayedLoad:
        """Send all requests, `at_once` in flight. Raises StudyFailed."""
        ...


class WatchedEngine(SteppingEngine):
    """An engine that records its gauges after every step."""

    def __init__(self, scenario: Scenario, name: str, samples: list[GaugeSample]) -> None:
        super().__init__(scenario.engine)
        self._name, self._samples = name, samples

    def advance(self, now: float) -> tuple[list[SimRequest], list[SimRequest]]:
        finished = super().advance(now)
        core = self.core
        self._samples.append(
            GaugeSample(
                self._name, now, core.running, core.waiting, core.kv_usage, core.preemptions
            )
        )
        return finished


class SimWay:
    """Simulated engines in virtual time, with or without the proxy. Every load starts empty.

    `watched` records gauges. Every step is then computed: slower, with the same times.
    """

    def __init__(self, name: str, scenario: Scenario, target: str, *, watched: bool) -> None:
        engine = scenario.engine
        self.name, self._scenario, self._watched = name, scenario, watched
        self.about = About(target, engine.model_spec, engine.gpu_spec, engine.context)
        self.max_num_seqs: int | None = engine.seqs
        self.pools: Sequence[Pool] = [
            Pool(engine.num_blocks(), engine.block_tokens)
        ] * scenario.gpus

    async def play(self, label: str, *phases: Sequence[TraceRequest]) -> list[PlayedLoad]:
        starts = [number * APART_S for number in range(len(phases))]
        rows: list[TraceRequest] = []
        for start, phase in zip(starts, phases, strict=True):
            rows += [replace(row, arrival_s=start + row.arrival_s) for row in phase]
        check_lengths(rows, self._scenario.engine.context)
        samples: list[GaugeSample] = []
        names = [f"gpu{number}" for number in range(self._scenario.gpus)]
        engines = {name: self._engine(name, samples) for name in names}
        outcomes = iter(Fleet(self._scenario.new_policy(names), engines).run(rows))
        loads = []
        for start, phase in zip(starts, phases, strict=True):
            end = math.inf if start == starts[-1] else start + APART_S
            of_phase = [next(outcomes) for _ in phase]
            if max((outcome.finished_s or 0.0 for outcome in of_phase), default=0.0) >= end:
                raise StudyFailed(f"{self.name}: a phase took more than {APART_S:g} s")
            seen = [seen_of(outcome, start) for outcome in of_phase]
            loads.append(PlayedLoad(seen, _within(samples, start, end)))
        return [load.checked(self.name) for load in loads]

    async def closed(self, label: str, rows: Sequence[TraceRequest], at_once: int) -> PlayedLoad:
        check_lengths(rows, self._scenario.engine.context)
        samples: list[GaugeSample] = []
        outcomes = closed_loop(rows, self._engine("gpu0", samples), "gpu0", at_once)
        return PlayedLoad([seen_of(outcome, 0.0) for outcome in outcomes], samples).checked(
            self.name
        )

    def _engine(self, name: str, samples: list[GaugeSample]) -> ServedEngine:
        if not self._watched:
            return self._scenario.new_engine()
        watched = WatchedEngine(self._scenario, name, samples)
        return ServedEngine(watched, self._scenario.engine.api_server())


def sim_ways(target: str, scenario: Scenario, *, watched: bool = False) -> list[Way]:
    """The engines of `scenario` without the proxy and with it."""
    direct = replace(scenario, policy=DIRECT)
    return [
        SimWay(IN_TURN, direct, target, watched=watched),
        SimWay(PROXY, scenario, target, watched=watched),
    ]


def _within(samples: Sequence[GaugeSample], start_s: float, end_s: float) -> list[GaugeSample]:
    """The samples from `start_s` to `end_s`, with times counted from `start_s`."""
    return [
        replace(sample, at_s=sample.at_s - start_s)
        for sample in samples
        if start_s <= sample.at_s < end_s
    ]


def seen_of(outcome: SimOutcome, start_s: float) -> Seen:
    """Convert the outcome of a request whose phase began at `start_s`."""
    row, first, last = outcome.request, outcome.first_token_s, outcome.finished_s
    many = row.output_tokens > 1
    rejected = outcome.reject
    return Seen(
        request=row,
        outcome="rejected" if rejected else "ok" if last is not None else "failed",
        reason=rejected.reason if rejected else None,
        due_s=row.arrival_s - start_s,
        done_s=None if last is None else last - start_s,
        ttft_s=outcome.ttft_s,
        e2e_s=None if last is None else last - row.arrival_s,
        tpot_s=(last - first) / (row.output_tokens - 1) if many and first and last else None,
        stall_s=outcome.stall_s if many and last is not None else None,
        prompt_tokens=row.input_tokens if last is not None else None,
        cached_tokens=outcome.cached_tokens if last is not None else None,
        backend=outcome.backend,
        waited_s=rejected.queued_s if rejected else None,
    )
