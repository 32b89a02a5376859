"""An autoscaler that reads the metrics follows the load, in virtual time.

The engines are simulated, and take two minutes to start. The autoscaler does what KEDA does with
its defaults: it reads every 30 s, adds backends at once, and removes them after five minutes.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import ceil, inf

import pytest
from overload import ENGINE, Make, capacity, chat, long_answer, mix, poisson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forebay.proxy.config.schema import Config
from forebay.proxy.core.model import Action, BackendSpec, Bucket, Reject, Request
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.telemetry.metrics.scaling_metrics import (
    WINDOW_S,
    FamilyNeed,
    ModelUse,
    ScalingMetrics,
)
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.scenario import Scenario
from forebay.traces.ground.schema import TraceRequest

LOOK_S, READ_S, START_S, STABLE_S = 5.0, 30.0, 120.0, 300.0


class Autoscaler:
    """Starts and ends backends of a shaper, as its metrics say.

    Attributes:
        sizes: backends that run or start, by time of change.
        saturation: as read, by time.
    """

    def __init__(self, shaper: Shaper, least: int) -> None:
        self.sizes = [(0.0, least)]
        self.saturation: dict[float, float] = {}
        self._shaper = shaper
        self._names = list(shaper.backends)
        self._least = least
        self._now = 0.0
        self._metrics = ScalingMetrics(shaper, lambda: self._now)
        self._registry = CollectorRegistry()
        self._registry.register(self._metrics)
        self._recent: deque[int] = deque(maxlen=round(STABLE_S / READ_S))
        self._ready_at: dict[str, float] = {}
        self._looks_at, self._reads_at = LOOK_S, READ_S

    def begin(self) -> list[Action]:
        """Leave only the first backends up."""
        return self._ended(self._names[self._least :], 0.0)

    def passes(self, now: float) -> list[Action]:
        """Carry out every change that is due by now."""
        self._now = now
        actions: list[Action] = []
        for name in [name for name, at in self._ready_at.items() if at <= now]:
            del self._ready_at[name]
            actions += self._shaper.backend_up(name, now)
        if now >= self._looks_at:
            self._looks_at = now + LOOK_S
            self._metrics.look(now)
        if now >= self._reads_at:
            self._reads_at = now + READ_S
            actions += self._scale(now)
        return actions

    def _scale(self, now: float) -> list[Action]:
        families = text_string_to_metric_families(generate_latest(self._registry).decode())
        read = {sample.name: sample.value for family in families for sample in family.samples}
        self.saturation[now] = read["forebay_saturation"]
        wanted = min(len(self._names), ceil(read["forebay_backends_wanted"]))
        self._recent.append(max(self._least, wanted))
        before = self.sizes[-1][1]
        size = max(self._recent[-1], min(before, max(self._recent)))
        if size != before:
            self.sizes.append((now, size))
        for name in self._names[before:size]:
            self._ready_at[name] = now + START_S
        return self._ended(self._names[size:before], now)

    def _ended(self, names: Iterable[str], now: float) -> list[Action]:
        actions: list[Action] = []
        for name in names:
            if self._ready_at.pop(name, None) is None:
                actions += self._shaper.backend_down(name, now)
        return actions


def play(trace: list[TraceRequest], least: int, most: int) -> tuple[Autoscaler, list[SimOutcome]]:
    """The trace on `least` backends, which an autoscaler changes up to `most`."""
    names = [f"gpu{number}" for number in range(most)]
    scenario = Scenario(engine=ENGINE, proxy=Config())
    shaper = scenario.new_policy(names)
    assert isinstance(shaper, Shaper)
    fleet = Fleet(shaper, {name: scenario.new_engine() for name in names})
    scaler = Autoscaler(shaper, least)

    def arrivals() -> Iterator[TraceRequest]:
        fleet._carry_out(scaler.begin(), 0.0)
        for row in trace:
            yield row
            fleet._carry_out(scaler.passes(row.arrival_s), row.arrival_s)

    return scaler, fleet.run(arrivals())


def rejected(outcomes: list[SimOutcome], since_s: float, until_s: float) -> float:
    """Share of the requests of this time."""
    chosen = [o for o in outcomes if since_s <= o.request.arrival_s < until_s]
    return sum(o.reject is not None for o in chosen) / len(chosen)


def test_a_load_that_triples_is_followed_up_and_down_without_flapping() -> None:
    rate = capacity(mix, 1)
    trace = poisson(mix, [(300.0, rate), (400.0, 3 * rate), (600.0, rate)], seed=0)
    scaler, outcomes = play(trace, 2, 9)
    counts = [count for _, count in scaler.sizes]
    # 1 / 0.7 and 3 / 0.7 backends are wanted.
    assert (counts[0], max(counts), counts[-1]) == (2, 5, 2)
    # Up, then down, and nothing else.
    top = counts.index(5)
    assert all(before < after for before, after in pairwise(counts[: top + 1]))
    assert all(before > after for before, after in pairwise(counts[top:]))
    # Two engines more start within 90 s. Once they are up, nothing is rejected any more.
    assert dict(scaler.sizes)[max(at for at, _ in scaler.sizes if at < 390.0)] >= 4
    assert rejected(outcomes, 0.0, 300.0) == 0.0
    assert rejected(outcomes, 300.0, 460.0) > 0.03
    assert rejected(outcomes, 390.0 + START_S, 1_300.0) == 0.0


@pytest.mark.parametrize("make", [chat, mix, long_answer])
@pytest.mark.parametrize("load", [0.4, 1.5])
def test_saturation_is_the_load_as_a_share_of_the_capacity(make: Make, load: float) -> None:
    """Above 1 too, because the work of rejected requests counts."""
    trace = poisson(make, [(120.0, load * capacity(make, 2))], seed=1)
    scaler, _ = play(trace, 2, 2)
    last = max(scaler.saturation)
    assert scaler.saturation[last] == pytest.approx(load, rel=0.2)


class Watched:
    """A shaper with a backend for each of these main models, and the use of each model."""

    def __init__(self, *families: str, slots: int = 10, kv_tokens: float = inf) -> None:
        self.shaper = shaper = Shaper(
            [BackendSpec(f"b{i}", slots, kv_tokens) for i in range(len(families))],
            [Bucket("chat", 100_000, 4, 2.0)],
        )
        self.use = ModelUse()
        shaper.report_demand(self.use.arrived)
        for name, family in zip(shaper.backends, families, strict=True):
            shaper.changes.set_models(name, frozenset({family}), 0.0, family=family)
            shaper.backend_up(name, 0.0)

    def look(self, now: float) -> None:
        self.use.look(self.shaper.backends.values(), now)

    def needs(self, now: float) -> dict[str, FamilyNeed]:
        return self.use.needs(self.shaper.backends.values(), now)


def test_each_model_has_its_own_figures() -> None:
    on = Watched("a", "b", "b")
    for number in range(40):
        on.shaper.arrive(Request(f"{number}", 9_000, 9, model="b"), float(number))
        on.look(float(number))
    figures = on.needs(40.0)
    assert set(figures) == {"a", "b"}
    assert figures["a"] == (0.0, 0.0)
    assert figures["b"].saturation > 0.1
    assert figures["b"].backends == pytest.approx(2 * figures["b"].saturation / 0.7)


def test_no_backend_that_is_up_leaves_what_is_wanted() -> None:
    on = Watched("a", "a")
    for number in range(40):
        on.shaper.arrive(Request(f"{number}", 20_000, 9, model="a"), number / 4)
    before = on.needs(10.0)["a"]
    on.shaper.backend_down("b0", 10.0)
    on.shaper.backend_down("b1", 10.0)
    after = on.needs(10.0)["a"]
    assert after.backends == before.backends
    assert after.saturation == 2 * before.saturation


@pytest.mark.parametrize(("slots", "kv_tokens", "share"), [(4, inf, 0.5), (99, 4_000.0, 0.5)])
def test_slots_and_kv_cache_count_where_prefills_are_short(
    slots: int, kv_tokens: float, share: float
) -> None:
    """Two requests that decode for long hold half of four slots, or half of the pool."""
    on = Watched("a", slots=slots, kv_tokens=kv_tokens)
    for number in range(2):
        on.shaper.arrive(Request(f"{number}", 1_000, 1, model="a"), 0.0)
        on.shaper.first_token(f"{number}", 0.1)
    for now in range(0, 300, 5):
        on.look(float(now))
    assert on.needs(300.0)["a"].saturation == pytest.approx(share, rel=0.02)
    # A short moment changes little, and the figure fades once they have ended.
    for number in range(2):
        on.shaper.finish(f"{number}", 300.0)
    on.look(305.0)
    assert 0.8 * share < on.needs(305.0)["a"].saturation < share
    on.look(600.0)
    assert on.needs(600.0)["a"].saturation < 0.01


def test_a_request_that_comes_back_when_told_counts_once() -> None:
    def use(*, again: bool) -> float:
        on, now = Watched("a", slots=1), 0.0
        for number in range(30):
            request = Request(f"{number}", 90_000, 9, model="a", identity=number + 1)
            for action in on.shaper.arrive(request, now):
                if isinstance(action, Reject) and again:
                    on.shaper.arrive(request, now + action.retry_after_s)
        return on.needs(WINDOW_S)["a"].saturation

    assert use(again=True) == pytest.approx(use(again=False), rel=0.1)


def test_a_proxy_that_has_just_started_says_the_same() -> None:
    """Its window is not full yet. Without the correction the autoscaler would end backends."""
    on, figures = Watched("a"), list[float]()
    for number in range(600):
        on.shaper.arrive(Request(f"{number}", 5_000, 9, model="a"), number / 2)
        if number in (40, 599):
            figures.append(on.needs(number / 2)["a"].backends)
    early, late = figures
    assert early == pytest.approx(late, rel=0.15)


def test_a_model_that_is_gone_is_forgotten() -> None:
    on = Watched("a")
    on.shaper.arrive(Request("1", 5_000, 9, model="a"), 0.0)
    on.shaper.changes.set_models("b0", frozenset({"b"}), 1.0, family="b")
    on.look(1.0)
    assert set(on.use._work) == set(on.use._began_at) == set()
    assert set(on.needs(1.0)) == {"b"}
