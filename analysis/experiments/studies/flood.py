"""The study `flood`: goodput and latency when more load is offered than the capacity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf, sqrt
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Axis, Panel, count_label, document, line
from forebay.analysis.experiments.http_system import (
    TARGET,
    check_no_engines,
    measured_by,
    ways_of,
)
from forebay.analysis.experiments.load_stats import good, middle_rate, percentile, ttfts, window_s
from forebay.analysis.experiments.result import FILLED, VARIED, Column, Row
from forebay.analysis.experiments.study import Engines, Gpus, Seed, Study, numbers
from forebay.analysis.experiments.systems import IN_TURN, PROXY, PlayedLoad, SimWay, Way
from forebay.analysis.experiments.target import SIM, StudyFailed
from forebay.analysis.statistics.knee import FOLLOWED, last_followed
from forebay.analysis.statistics.units import duration
from forebay.proxy.config.schema import Config
from forebay.replay.plan.slo import Slo, default_slos, parse_slos
from forebay.replay.sim.capacity import capacity_per_s
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.command_line.options import a_time
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.documents import Workload, workload

NO_FAIL_FAST = "proxy, no limits"
UNBOUNDED, FOREVER_S = 1_000_000, 3600.0
CAPACITY_REQUESTS, IN_FLIGHT = 200, 64  # per engine, to measure the capacity of a URL
QUEUED_SECONDS = 2000.0  # requests that are queued from the start, to measure simulated engines
SEARCH_SECONDS = 120.0  # seconds of each load that measures the proxy's capacity
SEARCHED, SEARCH_STEPS = (0.5, 4.0), 7  # multiples of the engines' capacity, found within 2 %
AT_ONCE_S = 0.5  # a rejection after a longer wait counts as admitted
CHAT_SHARE, USERS, DOCUMENTS = 0.7, 200, 40
NAMES = [bucket.name for bucket in DEFAULT_BUCKETS]


@dataclass(kw_only=True)
class Flood(Study):
    """Offered load from 0.5 to 3 times capacity: p50 and p99 TTFT, goodput,
    rejections.

    The traffic is chats and questions about shared documents. A sim: target runs
    without the proxy (round robin), with the proxy but without limits, and with its
    limits. With --engine (once per engine) the URL is taken for the proxy, and the
    engines also run without it. Loads are multiples of the engines' capacity
    without the proxy.

    Example:  forebay experiment flood --target sim:llama-3-8b@h200 --out runs/flood
    """

    NAME = "flood"
    COLUMNS = (
        Column("load", "load", "ratio"),
        Column("load_of_proxy", "proxy load", "ratio", when=FILLED),
        Column("way", "way", "text", when=VARIED),
        Column("offered_per_s", "offered", "rate", shown=False),
        Column("goodput_per_s", "goodput", "rate"),
        Column("attainment", "met", "share", shown=False),
        Column("ttft_p50_s", "TTFT p50"),
        Column("ttft_p99_s", "TTFT p99"),
        Column("rejected_share", "rejected", "share"),
        Column("late_share", "late", "share"),
        Column("chat_ttft_p99_s", "chat p99", shown=False),
        Column("document_ttft_p99_s", "document p99", shown=False),
        Column("requests", "requests", "count", shown=False),
        Column("failed", "failed", "count", shown=False),
        Column("verdict", "verdict", "text", shown=False),
    )
    SETTINGS = ("seed",)
    LOAD_KEYS = ("way", "load")

    engine: Engines = None
    loads_text: Annotated[
        str, typer.Option("--loads", help="Offered loads, as multiples of capacity.")
    ] = "0.5,1,1.5,2,3"
    capacity: Annotated[
        float | None, typer.Option(help="Requests per second; default: measured.")
    ] = None
    duration: Annotated[float, a_time("Time of each load.", "--duration", least_s=1)] = 180.0
    slo: Annotated[
        str | None, typer.Option(help="Targets; default: chat.ttft=2s,document.ttft=15s.")
    ] = None
    gpus: Gpus = 2
    seed: Seed = 0
    slos: Sequence[Slo] = field(init=False)
    ways: Sequence[Way] = field(init=False)
    per_s: float = field(init=False)  # the engines' capacity
    proxied_per_s: float | None = field(default=None, init=False)  # the proxy's, if known

    async def loads(self) -> Sequence[tuple[float, Way]]:
        factors = numbers(self.loads_text, "--loads")
        default = default_slos(DEFAULT_BUCKETS)
        self.slos = default if self.slo is None else parse_slos(self.slo, NAMES)
        if self.capacity is not None and not 0 < self.capacity < inf:
            raise InputError(f"--capacity {self.capacity:g}: give requests per second, more than 0")
        self.ways = await self.made_ways()
        self.measured = measured_by(self.ways)
        self.per_s = self.capacity or await self.measured_capacity()
        self.proxied_per_s = await self._proxy_capacity()
        return [(factor, way) for factor in factors for way in self.ways]

    async def row(self, load: tuple[float, Way]) -> Row:
        factor, way = load
        trace = requests(factor * self.per_s, self.duration, self.seed)
        (played,) = await way.play(f"flood-{factor:g}", trace)
        proxied = self.proxied_per_s
        row = row_of(way.name, factor, played, self.slos)
        return row | {"load_of_proxy": factor * self.per_s / proxied if proxied else None}

    async def made_ways(self) -> Sequence[Way]:
        if not self.target.startswith(SIM):
            return await ways_of(self, self.engine, self.gpus)
        check_no_engines(self.engine)
        config = self.engine_config()
        named = (
            (IN_TURN, Scenario(config, self.gpus, DIRECT)),
            (NO_FAIL_FAST, Scenario(config, self.gpus, proxy=patient_config())),
            (PROXY, Scenario(config, self.gpus, proxy=config_for(self.slos))),
        )
        return [SimWay(name, scenario, self.target, watched=False) for name, scenario in named]

    async def measured_capacity(self) -> float:
        """Requests per second that engines in turn complete with the whole trace queued."""
        if self.target.startswith(SIM):
            config = self.engine_config()
            return capacity_per_s(requests(1.0, QUEUED_SECONDS, self.seed), config, self.gpus)
        return await self._closed_capacity(self.ways[0])

    async def _proxy_capacity(self) -> float | None:
        """The most requests per second that the proxy completes, or None if not measured.

        The proxy reorders its queue, so its rate with the whole trace queued would mean little. A
        simulated proxy is searched for its highest rate. A proxy by URL gets IN_FLIGHT requests
        for each engine, unless --capacity is given.
        """
        named = {way.name: way for way in self.ways}
        if NO_FAIL_FAST in named:
            return await highest_followed(
                named[NO_FAIL_FAST],
                self.per_s,
                lambda rate: requests(rate, SEARCH_SECONDS, self.seed),
            )
        if self.capacity is None and PROXY in named:
            return await self._closed_capacity(named[PROXY])
        return None

    async def _closed_capacity(self, way: Way) -> float:
        """Requests per second that are completed with IN_FLIGHT in flight on each engine."""
        engines = max(1, len(way.pools))
        rows = requests(1.0, float(CAPACITY_REQUESTS * engines), self.seed)
        load = await way.closed("capacity", rows, IN_FLIGHT * engines)
        done = sorted(load.done_s)
        if len(done) < 2 or done[-1] <= 0:
            raise StudyFailed(f"{way.name}: too few answers to measure capacity; give --capacity")
        return len(done) / done[-1]

    def settings(self) -> dict[str, Any]:
        slos = [str(slo) for slo in self.slos]
        return super().settings() | {"slos": slos, "seconds": self.duration}

    def sentence(self, rows: Sequence[Row]) -> str:
        of = _by_way(rows)
        best = {name: max(row["goodput_per_s"] for row in mine) for name, mine in of.items()}
        last = {name: mine[-1] for name, mine in of.items()}
        knees = {name: _knee(mine) for name, mine in of.items()}
        self.facts |= {
            "capacity_per_s": self.per_s,
            "capacity_through_proxy_per_s": self.proxied_per_s,
            "kept": {
                name: row["goodput_per_s"] / best[name] if best[name] else None
                for name, row in last.items()
            },
            "knee_load": {name: load for name, (load, _) in knees.items()},
            "kept_from_knee": {name: share for name, (_, share) in knees.items()},
        }
        alone = list(of) == [TARGET]
        self._note_capacity(alone=alone)
        self.note("TTFT is of answered requests; goodput counts rejected ones as missed")
        self.note(
            "the engines were not measured without a proxy: name each with --engine", when=alone
        )
        few = any(row["ttft_p99_s"] is None for row in rows)
        self.note("–: a p99 needs 1,000 answers; raise --duration", when=few)
        self.note_failed(rows, "failed and count as missed")
        return _words(last, best)

    def _note_capacity(self, *, alone: bool) -> None:
        """Note how the capacities were measured, and the proxy's knee."""
        how = "measured with the whole trace queued" if self.capacity is None else "as given"
        if self.capacity is None and alone:
            how = f"measured with {IN_FLIGHT} in flight; with several engines, give --capacity"
        targets = ", ".join(map(str, self.slos))
        self.note(f"capacity {self.per_s:.2f} requests/s ({how}); targets: {targets}")
        if proxied := self.proxied_per_s:
            self.note(
                f"capacity through the proxy {proxied:.2f} requests/s; "
                f"a load of 1x is {self.per_s / proxied:.0%} of it"
            )
        self.note(
            "a proxy rejects by the targets of its own buckets: give it those above",
            when=not self.target.startswith(SIM),
        )
        knee, share = (self.facts[key].get(PROXY) for key in ("knee_load", "kept_from_knee"))
        if knee is not None:
            self.note(
                f"above {knee:g}x the proxy keeps at least {share:.0%} of its goodput at {knee:g}x"
            )

    def plot(self, rows: Sequence[Row]) -> str:
        x = Axis("offered load, multiple of capacity", count_label, log=False)
        goodput = Axis("goodput, requests per second within their targets", count_label, log=False)
        of = _by_way(rows)
        goodputs = [line(n, mine, "load", "goodput_per_s", zeros=True) for n, mine in of.items()]
        panels = [Panel(goodputs, x, goodput)]
        for key, title in (("ttft_p99_s", "TTFT p99"), ("ttft_p50_s", "TTFT p50")):
            times = [line(name, mine, "load", key) for name, mine in of.items()]
            if any(series.points for series in times):
                panels.append(Panel(times, x, Axis(f"{title} of answered requests"), keyed=False))
        return document(*panels)


def _by_way(rows: Sequence[Row]) -> dict[str, list[Row]]:
    names = dict.fromkeys(str(row["way"]) for row in rows)
    return {name: [row for row in rows if row["way"] == name] for name in names}


def patient_config() -> Config:
    """The default configuration without limits: every request waits, none is rejected."""
    limits = {"max_queue": UNBOUNDED, "max_wait": FOREVER_S, "target": FOREVER_S}
    return Config(buckets=tuple(bucket.model_copy(update=limits) for bucket in Config().buckets))


def config_for(slos: Sequence[Slo]) -> Config:
    """The default configuration, with the shortest TTFT target of each bucket."""
    buckets = []
    for bucket in Config().buckets:
        targets = [
            s.limit_s for s in slos if s.metric == "ttft" and s.bucket in (None, bucket.name)
        ]
        buckets.append(bucket.model_copy(update={"target": min(targets, default=bucket.target)}))
    return Config(buckets=tuple(buckets))


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
        if middle_rate(load.done_s) >= FOLLOWED * middle_rate(load.due_s):
            low = best = rate
        else:
            high = rate
    return best


def requests(rate_per_s: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Chats and questions about shared documents. A seed gives the same requests at any rate."""
    count = max(2, round(rate_per_s * seconds))
    spec = Workload(
        users=USERS,
        documents=DOCUMENTS,
        chat_share=CHAT_SHARE,
        rate_per_s=1.0,
        duration_s=None,
        requests=count,
        seed=seed,
    )
    rows = list(islice(workload(spec), count))
    pace = count / rate_per_s / rows[-1].arrival_s  # makes the mean rate exact
    return [replace(row, arrival_s=row.arrival_s * pace) for row in rows]


def row_of(way: str, factor: float, load: PlayedLoad, slos: Sequence[Slo]) -> Row:
    seen, length = load.seen, window_s(load.due_s)
    met = good(seen, slos)
    at_once = sum(
        reply.outcome == "rejected" and (reply.reject_latency_s or 0.0) <= AT_ONCE_S
        for reply in seen
    )
    admitted = len(seen) - at_once
    row = {
        "load": factor,
        "way": way,
        "requests": len(seen),
        "offered_per_s": len(seen) / length,
        "goodput_per_s": met / length,
        "attainment": met / len(seen),
        "ttft_p50_s": percentile(ttfts(seen), 50),
        "ttft_p99_s": percentile(ttfts(seen), 99),
        "rejected_share": load.count("rejected") / len(seen),
        "late_share": (admitted - met) / admitted if admitted else 0.0,
        "failed": load.count("failed"),
        "verdict": load.verdict,
    }
    for name in NAMES:
        of = ttfts(reply for reply in seen if reply.bucket == name)
        row[f"{name}_ttft_p99_s"] = percentile(of, 99)
    return row


def _knee(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Last load of which 95 % was in time, and the least goodput from there on as its share."""
    offered, goodput = ([row[key] for row in rows] for key in ("offered_per_s", "goodput_per_s"))
    knee = last_followed(offered, goodput)
    if knee is None:
        return None, None
    return rows[knee]["load"], min(goodput[knee:]) / goodput[knee]


def _words(last: dict[str, Row], best: dict[str, float]) -> str:
    """The conclusion from the row of the largest load and the best goodput of each way."""

    def of(name: str) -> str:
        row = last[name]
        share = row["goodput_per_s"] / best[name] if best[name] else 0.0
        p99 = row["ttft_p99_s"]
        tail = f" at a p99 TTFT of {duration(p99)}" if p99 is not None else ""
        return f"goodput {row['goodput_per_s']:.2f}/s ({share:.0%} of its best){tail}"

    name = PROXY if PROXY in last else next(iter(last))
    others = [other for other in last if other != name]
    mine, load, rejected = (last[name][key] for key in ("goodput_per_s", "load", "rejected_share"))
    helps = all(mine > last[other]["goodput_per_s"] for other in others)
    words = (
        f"At {load:g}x capacity the {name}{'' if helps else ' does not help: it'} has {of(name)}"
    )
    parts = [f"{words} and rejects {rejected:.0%}"]
    return ". ".join([*parts, *(f"{other.capitalize()}: {of(other)}" for other in others)]) + "."
