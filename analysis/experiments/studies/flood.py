"""The study `flood`: goodput and latency when more load is offered than the capacity."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.load_stats import doubted, good, percentile, ttfts, window_s
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.studies.flood_setup import (
    config_with,
    highest_followed,
    max_waits_s,
    patient_config,
)
from forebay.analysis.experiments.study import Batched, Engines, Gpus, Seed, Study, numbers, study
from forebay.analysis.experiments.system_from_options import TARGET, ways_of
from forebay.analysis.experiments.systems import IN_TURN, PROXY, PlayedLoad, SimWay, Way
from forebay.analysis.experiments.target import SIM, StudyFailed
from forebay.analysis.statistics.knee import last_followed
from forebay.analysis.statistics.units import duration
from forebay.replay.plan.slo import Slo, default_slos, parse_slos
from forebay.replay.sim.capacity import capacity_per_s
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.buckets import DEFAULT_BUCKETS, bucket_of
from forebay.traces.command_line.options import a_time
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest
from forebay.traces.synth.documents import Workload, workload

HELP = """Offered load from 0.5 to 3 times capacity: p50 and p99 TTFT, goodput,
rejections.

The traffic is chats and questions about shared documents. A sim: target runs
without the proxy (round robin), with the proxy but without limits, and with its
limits. With --engine (once per engine) the URL is taken for the proxy, and the
engines also run without it. Loads are multiples of the engines' capacity
without the proxy.

Example:  forebay experiment flood --target sim:llama-3-8b@h200 --out runs/flood
"""
NO_FAIL_FAST = "proxy, no limits"
CAPACITY_REQUESTS, IN_FLIGHT = 200, 64  # per engine, to measure the capacity of a URL
QUEUED_SECONDS = 2000.0  # requests that are queued from the start, to measure simulated engines
SEARCH_SECONDS = 120.0  # seconds of each load that measures the proxy's capacity
AT_ONCE_S = 0.5  # a request that is rejected later than this was admitted before
CHAT_SHARE, USERS, DOCUMENTS = 0.7, 200, 40
NAMES = [bucket.name for bucket in DEFAULT_BUCKETS]
COLUMNS = (
    Column("load", "load", "ratio"),
    Column("load_of_proxy", "proxy load", "ratio"),
    Column("way", "way", "text"),
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


@study("flood")
def command(
    options: Study,
    engine: Engines = None,
    loads: Annotated[
        str, typer.Option(help="Offered loads, as multiples of capacity.")
    ] = "0.5,1,1.5,2,3",
    capacity: Annotated[
        float | None, typer.Option(help="Requests per second; default: measured.")
    ] = None,
    duration: Annotated[float, a_time("Time of each load.", "--duration", least_s=1)] = 180.0,
    slo: Annotated[
        str | None, typer.Option(help="Targets; default: chat.ttft=2s,document.ttft=15s.")
    ] = None,
    gpus: Gpus = 2,
    max_num_batched_tokens: Batched = None,
    seed: Seed = 0,
) -> None:
    factors = numbers(loads, "--loads")
    slos = default_slos(DEFAULT_BUCKETS) if slo is None else parse_slos(slo, NAMES)
    if capacity is not None and not 0 < capacity < float("inf"):
        raise InputError(f"--capacity {capacity:g}: give requests per second, more than 0")

    async def work() -> Result:
        batched = max_num_batched_tokens
        max_wait_s = {}
        if options.targets[0].startswith(SIM):
            longest = requests(QUEUED_SECONDS, 1.0, seed)
            config = options.engine(options.targets[0], batched)
            max_wait_s = max_waits_s(slos, longest, config)
        ways = await _ways(options, engine, gpus, batched, max_wait_s)
        limit = capacity or await _capacity(options, ways, gpus, batched, seed)
        limits = limit, await _proxy_capacity(ways, limit, capacity is None, seed)
        return await flooded(
            options, ways, factors, limits, capacity is None, slos, duration, seed, max_wait_s
        )

    options.finish(work())


async def flooded(
    options: Study, ways: Sequence[Way], factors: Sequence[float],
    limits: float | tuple[float, float | None], measured: bool,
    slos: Sequence[Slo], seconds: float, seed: int, max_wait_s: Mapping[str, float] | None = None,
) -> Result:  # fmt: skip
    """Offer each way `factors` times the capacity, for `seconds` each.

    Args:
        limits: capacity in requests per second without the proxy, and through it if known.
        max_wait_s: longest wait in the proxy's buckets, where the study has set it.
    """
    limit, proxied = limits if isinstance(limits, tuple) else (limits, None)
    rows = []
    for factor in factors:
        trace = requests(factor * limit, seconds, seed)
        for way in ways:
            (load,) = await way.play(f"flood-{factor:g}", trace)
            row = table_row(way.name, factor, load, slos)
            row["load_of_proxy"] = factor * limit / proxied if proxied else None
            rows.append(row)
    settings = options.settings(seed=seed, slos=[str(slo) for slo in slos], seconds=seconds)
    settings["max_wait_s"] = dict(max_wait_s or {})
    target = ", ".join(dict.fromkeys(way.about.name for way in ways))
    return result(target, rows, limit, measured, settings, proxied)


async def _ways(
    options: Study,
    engines: Sequence[str] | None,
    gpus: int,
    batched: int | None,
    max_wait_s: Mapping[str, float] | None = None,
) -> Sequence[Way]:
    (target,) = options.targets
    if engines or not target.startswith(SIM):
        return await ways_of(options, engines, gpus, batched)
    proxied = Scenario(options.engine(target, batched), gpus)
    patient = replace(proxied, proxy=patient_config())
    proxied = replace(proxied, proxy=config_with(max_wait_s or {}))
    named = (
        (IN_TURN, replace(proxied, policy=DIRECT)),
        (NO_FAIL_FAST, patient),
        (PROXY, proxied),
    )
    return [SimWay(name, scenario, target, watched=False) for name, scenario in named]


async def _capacity(
    options: Study, ways: Sequence[Way], gpus: int, batched: int | None, seed: int
) -> float:
    """Requests per second that engines in turn complete with the whole trace queued at once."""
    (target,) = options.targets
    if target.startswith(SIM):
        config = options.engine(target, batched)
        return capacity_per_s(requests(1.0, QUEUED_SECONDS, seed), config, gpus)
    return await _closed_capacity(ways[0], len(ways[0].pools), seed)


async def _proxy_capacity(
    ways: Sequence[Way], limit: float, measured: bool, seed: int
) -> float | None:
    """The most requests per second that the proxy completes, or None if not measured.

    The proxy changes the order of its queue, so the whole trace at once would tell little.
    """
    named = {way.name: way for way in ways}
    if NO_FAIL_FAST in named:
        return await highest_followed(
            named[NO_FAIL_FAST], limit, lambda rate: requests(rate, SEARCH_SECONDS, seed)
        )
    if measured and PROXY in named:
        return await _closed_capacity(named[PROXY], len(named[PROXY].pools), seed)
    return None


async def _closed_capacity(way: Way, engines: int, seed: int) -> float:
    """Requests per second that are completed with IN_FLIGHT in flight on each engine."""
    engines = max(1, engines)
    rows = requests(1.0, float(CAPACITY_REQUESTS * engines), seed)
    load = await way.closed("capacity", rows, IN_FLIGHT * engines)
    done = sorted(reply.done_s for reply in load.seen if reply.ok and reply.done_s is not None)
    if len(done) < 2 or done[-1] <= 0:
        raise StudyFailed(f"{way.name}: too few answers to measure capacity; give --capacity")
    return len(done) / done[-1]


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


def table_row(way: str, factor: float, load: PlayedLoad, slos: Sequence[Slo]) -> dict[str, Any]:
    seen, length = load.seen, window_s(load.seen)
    met = good(seen, slos)
    at_once = sum(
        reply.outcome == "rejected" and (reply.waited_s or 0.0) <= AT_ONCE_S for reply in seen
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
        "rejected_share": sum(reply.outcome == "rejected" for reply in seen) / len(seen),
        "late_share": (admitted - met) / admitted if admitted else 0.0,
        "failed": sum(reply.outcome == "failed" for reply in seen),
        "verdict": load.verdict,
    }
    for name in NAMES:
        of = [reply for reply in seen if bucket_of(reply.request.input_tokens) == name]
        row[f"{name}_ttft_p99_s"] = percentile(ttfts(of), 99)
    return row


def result(
    target: str,
    rows: list[dict[str, Any]],
    limit: float,
    measured: bool,
    settings: dict[str, Any],
    proxied: float | None = None,
) -> Result:
    names = list(dict.fromkeys(str(row["way"]) for row in rows))
    most = max(row["load"] for row in rows)
    best = {name: max(row["goodput_per_s"] for row in rows if row["way"] == name) for name in names}
    last = {row["way"]: row for row in rows if row["load"] == most}
    facts: dict[str, Any] = {
        "capacity_per_s": limit,
        "capacity_through_proxy_per_s": proxied,
        "max_wait_s": settings["max_wait_s"],
        "kept": {name: last[name]["goodput_per_s"] / best[name] if best[name] else None
                 for name in names},
        "knee_load": {name: _knee(rows, name)[0] for name in names},
        "kept_from_knee": {name: _knee(rows, name)[1] for name in names},
    }  # fmt: skip
    notes = _notes(names, rows, limit, measured, settings["slos"])
    notes[1:1] = _proxy_notes(limit, proxied, settings["max_wait_s"], facts)
    words = doubted(_sentence(names, last, best, most), notes, rows, "way", "load")
    shown = {"way": len(names) > 1, "load_of_proxy": proxied is not None}
    columns = [column for column in COLUMNS if shown.get(column.key, True)]
    plot = _plot(rows, names)
    return Result("flood", target, words, columns, rows, facts, plot, notes, settings)


def _knee(rows: Sequence[dict[str, Any]], way: str) -> tuple[float | None, float | None]:
    """Last load of which 95 % was in time, and the least goodput from there on as its share."""
    rows = [row for row in rows if row["way"] == way]
    offered, goodput = ([row[key] for row in rows] for key in ("offered_per_s", "goodput_per_s"))
    knee = last_followed(offered, goodput)
    if knee is None:
        return None, None
    return rows[knee]["load"], min(goodput[knee:]) / goodput[knee]


def _notes(
    names: list[str],
    rows: list[dict[str, Any]],
    limit: float,
    measured: bool,
    slos: Sequence[str],
) -> list[str]:
    alone = names == [TARGET]
    how = "measured with the whole trace queued" if measured else "as given"
    if measured and alone:
        how = f"measured with {IN_FLIGHT} in flight; with several engines, give --capacity"
    notes = [
        f"capacity {limit:.2f} requests/s ({how}); targets: {', '.join(slos)}",
        "TTFT is of answered requests; goodput counts rejected ones as missed",
    ]
    if alone:
        notes.append("the engines were not measured without a proxy: name each with --engine")
    if any(row["ttft_p99_s"] is None for row in rows):
        notes.append("–: a p99 needs 1,000 answers; raise --duration")
    if failed := sum(row["failed"] for row in rows):
        notes.append(f"{failed} requests failed and count as missed")
    return notes


def _proxy_notes(
    limit: float, proxied: float | None, max_wait_s: Mapping[str, float], facts: Mapping[str, Any]
) -> list[str]:
    notes = []
    if proxied:
        share = limit / proxied
        notes.append(
            f"capacity through the proxy {proxied:.2f} requests/s: 1x is {share:.2f}x of it"
        )
    if max_wait_s:
        waits = ", ".join(f"{name} {wait_s:g} s" for name, wait_s in max_wait_s.items())
        notes.append(f"max_wait of the proxy: {waits} (target less the longest prefill)")
    else:
        notes.append(
            "an admitted request is in time only if max_wait is at most its target less the "
            "longest prefill"
        )
    knee, kept_share = (facts[key].get(PROXY) for key in ("knee_load", "kept_from_knee"))
    if knee is not None:
        notes.append(
            f"the proxy's knee is at {knee:g}x; beyond it goodput is at least {kept_share:.0%}"
        )
    return notes


def _sentence(
    names: Sequence[str], last: dict[str, dict[str, Any]], best: dict[str, float], most: float
) -> str:
    def of(name: str) -> str:
        row = last[name]
        share = row["goodput_per_s"] / best[name] if best[name] else 0.0
        p99 = row["ttft_p99_s"]
        tail = f" at a p99 TTFT of {duration(p99)}" if p99 is not None else ""
        return f"goodput {row['goodput_per_s']:.2f}/s ({share:.0%} of its best){tail}"

    if PROXY not in names:
        (name,) = names
        rejected = last[name]["rejected_share"]
        return f"At {most:g}x capacity the {name} has {of(name)} and rejects {rejected:.0%}."
    others = [name for name in names if name != PROXY]
    peer = max(others, key=lambda name: float(last[name]["goodput_per_s"]))
    mine, theirs = last[PROXY]["goodput_per_s"], last[peer]["goodput_per_s"]
    words = f"At {most:g}x capacity the proxy"
    words += " has" if mine > theirs else " does not help: it has"
    words += f" {of(PROXY)} and rejects {last[PROXY]['rejected_share']:.0%}. "
    return words + ". ".join(f"{name.capitalize()}: {of(name)}" for name in others) + "."


def _plot(rows: list[dict[str, Any]], names: Sequence[str]) -> str:
    def of(key: str) -> list[Series]:
        series = []
        for name in names:
            mine = [r for r in rows if r["way"] == name and r[key] is not None]
            points = [(r["load"], r[key]) for r in mine]
            series.append(Series(name, points, points))
        return series

    x = Axis("offered load, multiple of capacity", count_label, log=False)
    goodput = Axis("goodput, requests per second within their targets", count_label, log=False)
    panels = [Panel(of("goodput_per_s"), x, goodput, key_left=True)]
    for key, title in (("ttft_p99_s", "TTFT p99"), ("ttft_p50_s", "TTFT p50")):
        if any(series.points for series in of(key)):
            panels.append(Panel(of(key), x, Axis(f"{title} of answered requests"), keyed=False))
    return document(*panels)
