"""The ways from users to engines that a study compares, and the results of a load on each.

`sim:MODEL@GPU` has two ways: the engines in round robin, and the proxy in front of the same
engines, both in virtual time. Each URL is one more way. A load consists of phases. A phase begins
when the previous phase has ended, with the prefix cache that it left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forebay.analysis.experiments.gauges import GaugeSample, Pool
from forebay.analysis.experiments.target import About, StudyFailed
from forebay.replay.results.merge import TIMES
from forebay.replay.results.row import Row as RequestRow
from forebay.replay.sim.closed_loop import closed_loop
from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.served import ServedEngine
from forebay.replay.sim.engine.stepping import SteppingEngine
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.run_folder import row_of
from forebay.replay.sim.scenario import DIRECT, Scenario, check_lengths
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.schema import TraceRequest

IN_TURN, PROXY = "round robin", "proxy"
APART_S = 600.0  # between the starts of phases; waiting costs nothing in virtual time


@dataclass(frozen=True, slots=True)
class PlayedLoad:
    """The measurements of one phase. `verdict` and `reason` are a replay's.

    Attributes:
        seen: the row of each request. Times count from the start of its phase.
    """

    seen: Sequence[RequestRow]
    samples: Sequence[GaugeSample] = ()
    verdict: str = "valid"
    reason: str = "simulated: every arrival is at its time"

    @property
    def answered(self) -> list[RequestRow]:
        return [reply for reply in self.seen if reply.outcome == "ok"]

    @property
    def due_s(self) -> list[float]:
        """When each request was due."""
        return [reply.intended_s or 0.0 for reply in self.seen]

    @property
    def done_s(self) -> list[float]:
        """When each answer was complete, of answered requests only."""
        return [reply.done_s for reply in self.answered if reply.done_s is not None]

    def count(self, outcome: str) -> int:
        """Return the number of requests with this outcome."""
        return sum(reply.outcome == outcome for reply in self.seen)

    def checked(self, way: str) -> "PlayedLoad":
        """Return self. Raises StudyFailed if no request was answered."""
        if not self.answered:
            why = ", ".join(sorted({reply.reason or reply.outcome for reply in self.seen}))
            raise StudyFailed(f"{way}: none of {len(self.seen)} requests was answered ({why})")
        return self


@dataclass
class Way:
    """One way from users to engines.

    Attributes:
        pools: the reported KV caches, empty if unknown.
        max_num_seqs: None if unknown. No server reports it.
    """

    name: str
    about: About
    pools: Sequence[Pool]
    max_num_seqs: int | None = field(default=None, kw_only=True)

    async def play(self, label: str, *phases: Sequence[TraceRequest]) -> list[PlayedLoad]:
        """Send every request when it is due in its phase. Raises StudyFailed."""
        raise NotImplementedError

    async def closed(self, label: str, rows: Sequence[TraceRequest], at_once: int) -> PlayedLoad:
        """Send all requests, `at_once` in flight. Raises StudyFailed."""
        raise NotImplementedError

    def api_server_s(self, prompt_tokens: int) -> float | None:
        """Seconds that a text spends in an idle API server. None if it is unknown."""
        return None


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


class SimWay(Way):
    """Simulated engines in virtual time, with or without the proxy. Every load starts empty.

    `watched` records gauges. Every step is then computed: slower, with the same times.
    """

    def __init__(self, name: str, scenario: Scenario, target: str, *, watched: bool) -> None:
        engine = scenario.engine
        about = About(target, engine.model_spec, engine.gpu_spec, engine.context)
        pools = [Pool(engine.kv_budget.blocks, engine.kv_budget.layout.block_size)] * scenario.gpus
        super().__init__(name, about, pools, max_num_seqs=engine.seqs)
        self._scenario, self._watched = scenario, watched

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
            seen = [row_since(outcome, start) for outcome in of_phase]
            loads.append(PlayedLoad(seen, _within(samples, start, end)).checked(self.name))
        return loads

    async def closed(self, label: str, rows: Sequence[TraceRequest], at_once: int) -> PlayedLoad:
        check_lengths(rows, self._scenario.engine.context)
        samples: list[GaugeSample] = []
        outcomes = closed_loop(rows, self._engine("gpu0", samples), "gpu0", at_once)
        seen = [row_since(outcome, 0.0) for outcome in outcomes]
        return PlayedLoad(seen, samples).checked(self.name)

    def api_server_s(self, prompt_tokens: int) -> float | None:
        times = self._scenario.engine.step_constants().server_times()
        return times.alone_s(prompt_tokens)

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
    within = (sample for sample in samples if start_s <= sample.at_s < end_s)
    return [replace(sample, at_s=sample.at_s - start_s) for sample in within]


def row_since(outcome: SimOutcome, start_s: float) -> RequestRow:
    """Return the row of a request whose phase began at `start_s`."""
    row = row_of(outcome, DEFAULT_BUCKETS, None)
    times = {name: at - start_s for name in TIMES if (at := getattr(row, name)) is not None}
    return replace(row, **times)
