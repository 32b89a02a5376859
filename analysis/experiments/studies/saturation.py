"""The study `saturation`: throughput against load, its knee, and the limit reached there."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from statistics import median
from typing import Annotated

import typer

from forebay.analysis.charts.panels import Axis, Panel, count_label, document, line
from forebay.analysis.experiments.gauges import GaugeSample
from forebay.analysis.experiments.http_system import one_way
from forebay.analysis.experiments.load_stats import middle_rate, percentile, ttfts
from forebay.analysis.experiments.result import FILLED, Column, Row
from forebay.analysis.experiments.study import (
    PromptTokens,
    Seed,
    Study,
    integers,
    numbers,
)
from forebay.analysis.experiments.systems import PlayedLoad, SimWay, Way
from forebay.analysis.experiments.target import MOST_SEQUENCES, SIM
from forebay.analysis.statistics.knee import (
    FLAT,
    FLAT_THROUGHOUT,
    FOLLOWING,
    KNEEDLE,
    gain_of_last_doubling,
    is_flat,
    kneedle,
    last_followed,
)
from forebay.analysis.statistics.units import duration, ratio
from forebay.replay.results.row import Row as Reply
from forebay.traces.ground.command_line.options import a_time
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.arrivals import arrival_times

LEAST_URL, LEAST_SIM = 24, 200  # fewest requests of a load
ROUNDS = 5  # fewest requests of a level per request in flight
MORE_SEATS = 4
START = 2  # of them are sent until the load is steady, at most
KV_FULL = 0.9


@dataclass(kw_only=True)
class Saturation(Study):
    """Throughput against load: the knee, max_num_seqs, and the value to give it.

    Keeps 1, 2, 4 ... requests in flight, or offers the rates of --rates, and
    finds the load above which throughput no longer grows. A sim: target is one
    engine, with which the advised max_num_seqs is tried.

    Example:  forebay experiment saturation --target sim:phi-3-mini@h200-nvl --out runs/saturation
    """

    NAME = "saturation"
    COLUMNS = (
        Column("load", "in flight", "count"),
        Column("requests_per_s", "completed", "rate"),
        Column("tokens_per_s", "tokens/s", "count"),
        Column("steady", "n", "count"),
        Column("ttft_s", "TTFT p50"),
        Column("ttft_p95_s", "p95"),
        Column("ttft_p99_s", "p99"),
        Column("tpot_s", "TPOT p50"),
        Column("running", "running", "count", shown=False),
        Column("waiting", "waiting", "count", shown=False),
        Column("kv_share", "KV", "share", shown=False),
        Column("rejected", "rejected", "count", shown=False),
        Column("verdict", "verdict", "text", shown=False),
        Column("knee", "", "text", when=FILLED),
    )
    SETTINGS = ("seed", "prompt_tokens", "output_tokens")
    LOAD_KEYS = ("load",)

    concurrency: Annotated[str, typer.Option(help="Requests in flight; k is 1,024.")] = (
        "1,2,4,8,16,32,64,128,256,512"
    )
    rates: Annotated[
        str | None, typer.Option(help="Requests per second, Poisson, instead: 1,2,4,8.")
    ] = None
    prompt_tokens: PromptTokens = 1000
    output_tokens: Annotated[
        int, typer.Option(min=2, help="Mean output tokens; each request ± 50 %.")
    ] = 200
    duration: Annotated[
        float, a_time("Time of each rate of --rates.", "--duration", least_s=30)
    ] = 120.0
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Fewest requests of a load whose latency counts: a p95 needs 200, a p99 1000; "
            "default: 24, for a sim: target 200.",
        ),
    ] = None
    seed: Seed = 0
    way: Way = field(init=False)
    seats_tried: int | None = field(default=None, init=False)
    tried: Row | None = field(default=None, init=False)

    @property
    def paced(self) -> bool:
        """True if the loads are rates."""
        return self.rates is not None

    async def loads(self) -> Sequence[float]:
        levels = [float(n) for n in integers(self.concurrency, "--concurrency")]
        if self.rates is not None:
            levels = numbers(self.rates, "--rates")
        if len(levels) < 3:
            raise InputError(
                "--concurrency, --rates: give 3 loads or more: a knee lies between two"
            )
        self.way = await one_way(self)
        self.measured = self.way.about.name
        self.way.about.check_length(
            self.prompt_tokens + self.output_tokens * 3 // 2,
            f"--prompt-tokens {self.prompt_tokens} with its output",
        )
        return levels

    async def row(self, load: float) -> Row:
        if self.paced:
            return await self.at_rate(load)
        return await self.at_concurrency(self.way, int(load))

    async def at_concurrency(self, way: Way, at_once: int) -> Row:
        """Throughput and latency of the steady part: after one round of answers.

        The requests of the first round begin together, so their prefills wait for one another.
        """
        rows = self._unpaced(at_once, max(self._least + START * at_once, ROUNDS * at_once))
        load = await way.closed(f"closed-{at_once}", rows, at_once)
        done = sorted(
            (reply.done_s, reply.asked_tokens or 0)
            for reply in load.answered
            if reply.done_s is not None
        )
        start = done[min(at_once, len(done)) - 1][0]
        stop = max(load.due_s)
        within = [tokens for at, tokens in done if start < at <= stop]
        length = stop - start
        steady = length > 0 and len(within) >= at_once / 2
        return _row(
            load,
            [reply for reply in load.seen if (reply.intended_s or 0.0) >= start] or load.seen,
            at_once,
            len(within) / length if steady else len(done) / done[-1][0],
            sum(within) / length if steady else sum(t for _, t in done) / done[-1][0],
        )

    async def at_rate(self, rate: float) -> Row:
        """Throughput of the middle 80 % of the answers, and of the same part of the arrivals.

        Latency is of the requests after the first tenth, in which the engine fills.
        """
        load = (await self.way.play(f"rate-{rate:g}", self._paced(rate)))[0]
        done, offered = load.done_s, middle_rate(load.due_s)
        # A share of all requests sent: a server that rejects half of them completes half the rate.
        achieved = middle_rate(done) * len(done) / len(load.seen)
        tokens = sum(reply.asked_tokens or 0 for reply in load.answered)
        in_order = sorted(load.seen, key=lambda reply: reply.intended_s or 0.0)
        steady = in_order[len(in_order) // 10 :]
        row = _row(load, steady, rate, achieved, tokens * achieved / len(done))
        return row | {"offered_per_s": offered}

    @property
    def _least(self) -> int:
        """The smallest number of requests of a load."""
        return self.requests or (LEAST_SIM if self.target.startswith(SIM) else LEAST_URL)

    def _unpaced(self, load: float, count: int) -> list[TraceRequest]:
        """Unshared prompts. Output lengths vary by half, so that answers do not end together."""
        dice = Random(f"{self.seed}:saturation:{load:g}")
        low, high = max(2, self.output_tokens // 2), self.output_tokens + self.output_tokens // 2
        return [
            TraceRequest(f"load-{load:g}-{i}", 0.0, self.prompt_tokens, dice.randint(low, high))
            for i in range(count)
        ]

    def _paced(self, rate: float) -> list[TraceRequest]:
        """Poisson arrivals, stretched so that the mean rate is exactly `rate`."""
        rows = self._unpaced(rate, max(self._least, round(rate * self.duration)))
        times = list(islice(arrival_times("poisson", rate, self.seed), len(rows)))
        stretch = len(rows) / rate / times[-1]
        return [replace(row, arrival_s=at * stretch) for row, at in zip(rows, times, strict=True)]

    async def more(self, rows: Sequence[Row]) -> None:
        """Run the largest load of a simulated engine again with the advised max_num_seqs.

        A knee at max_num_seqs says nothing about the engine, so the loads from there on are run
        with more seats.
        """
        at, _, _ = self.knee(rows)
        seats = self.way.max_num_seqs
        if self.paced or at is None or seats is None or not isinstance(self.way, SimWay):
            return
        knee = int(rows[at]["load"])
        if knee >= seats:
            self.seats_tried = max(MOST_SEQUENCES, MORE_SEATS * seats)
            wider = await one_way(self, max_num_seqs=self.seats_tried)
            loads = [int(row["load"]) for row in rows[at:] if row["load"] <= self.seats_tried]
            tried = [await self.at_concurrency(wider, load) for load in loads]
            best, _, _ = self.knee(tried)
            self.tried = tried[-1 if best is None else best]
        elif at < len(rows) - 1:
            self.seats_tried = knee
            advised = await one_way(self, max_num_seqs=knee)
            self.tried = await self.at_concurrency(advised, int(rows[-1]["load"]))

    def knee(self, rows: Sequence[Row]) -> tuple[int | None, str, float]:
        """Index of the knee (None if not reached), its rule, and the gain of the last doubling."""
        loads, completed = ([row[key] for row in rows] for key in ("load", "requests_per_s"))
        gain = gain_of_last_doubling(loads, completed)
        if self.paced:
            at = last_followed([row["offered_per_s"] for row in rows], completed)
            # Nothing beyond the last rate was tried, so it is no knee.
            return None if at == len(rows) - 1 else at, FOLLOWING, gain
        if gain < FLAT and is_flat(completed):
            return 0, FLAT_THROUGHOUT, gain
        return kneedle(loads, completed) if gain < FLAT else None, KNEEDLE, gain

    def seats(self, rows: Sequence[Row]) -> tuple[int | None, str]:
        """The engine's max_num_seqs (None if unknown), and how it is known."""
        if self.way.max_num_seqs is not None:
            return self.way.max_num_seqs, "read from the configuration"
        seen = [row["seats"] for row in rows if row["seats"]]
        if len(seen) >= 2 and seen[-1] == seen[-2]:  # more load, but no more running
            return seen[-1], "inferred: the most that ran while others waited and KV cache was free"
        if all(row["running"] is None for row in rows):
            return None, "unknown: the target has no vLLM metrics (a proxy does not pass them on)"
        return None, "not reached at these loads"

    def columns(self, rows: Sequence[Row]) -> Sequence[Column]:
        first, *others = super().columns(rows)
        return [replace(first, heading="offered", kind="rate") if self.paced else first, *others]

    def sentence(self, rows: Sequence[Row]) -> str:
        at, rule, gain = self.knee(rows)
        knee = None if at is None else rows[at]
        for row in rows:
            row["knee"] = "knee" if row is knee else ""
        seats, how = self.seats(rows)
        self.facts |= {
            "knee_load": knee and knee["load"],
            "t_sat_requests_per_s": knee and knee["requests_per_s"],
            "t_sat_tokens_per_s": knee and knee["tokens_per_s"],
            "knee_rule": rule,
            "last_doubling_gain": gain if gain != float("inf") else None,
            "max_num_seqs": seats,
            "max_num_seqs_known": how,
            "advised_max_num_seqs": None if self.paced or knee is None else self._advised(knee),
            "with_advised": self.tried,
        }
        self.notes += [f"knee: {rule}", f"max_num_seqs: {seats or 'unknown'} ({how})"]
        self.note_failed(rows, "failed and count as not completed")
        self.note("n: requests whose latency counts; those until the load is steady are left out")
        few = rows[0].get("ttft_p99_s") is None
        self.note("a p95 needs 200 requests of a load and a p99 1,000: --requests 1000", when=few)
        if knee is None:
            return self._no_knee(rows, gain)
        return self._saturated(rows, knee) + self._advice(knee, rows[-1])

    def _advised(self, knee: Row) -> int:
        return int((self._beyond_the_cap(knee) or knee)["load"])

    def _beyond_the_cap(self, knee: Row) -> Row | None:
        """The best load with more seats, if the knee is max_num_seqs itself."""
        seats = self.way.max_num_seqs
        return self.tried if seats is not None and knee["load"] >= seats else None

    def _saturated(self, rows: Sequence[Row], knee: Row) -> str:
        last = rows[-1]
        unit = "requests/s offered" if self.paced else "requests in flight"
        since = "already at the first load," if knee is rows[0] and not self.paced else "from"
        words = (
            f"Saturated {since} {knee['load']:g} {unit}: T_sat = {knee['requests_per_s']:.2f} "
            f"requests/s, {knee['tokens_per_s']:,.0f} output tokens/s, at a median TTFT of "
            f"{duration(knee['ttft_s'])}"
        )
        if knee is last:
            return words + "."
        more = last["requests_per_s"] / knee["requests_per_s"] - 1
        later = ratio(last["ttft_s"] / knee["ttft_s"])
        return f"{words}. At {last['load']:g}, throughput is {more:+.0%} and TTFT {later} as long."

    def _advice(self, knee: Row, last: Row) -> str:
        """Describe the effect of the advised max_num_seqs at the largest load, or of more seats."""
        advised, tried = self.facts["advised_max_num_seqs"], self.tried
        if advised is None:
            return ""
        if (best := self._beyond_the_cap(knee)) is not None:
            more = ratio(best["tokens_per_s"] / knee["tokens_per_s"])
            return (
                f" The knee is max_num_seqs itself, {self.way.max_num_seqs}. With --max-num-seqs "
                f"{self.seats_tried}, {best['load']:g} in flight have {more} the output tokens/s "
                f"({best['tokens_per_s']:,.0f}) at {duration(best['tpot_s'])} per token."
            )
        words = f" Give --max-num-seqs {advised}"
        if tried is None:
            return words + "."
        return (
            f"{words}: {last['load']:g} in flight then have {tried['tokens_per_s']:,.0f} output "
            f"tokens/s at {duration(tried['tpot_s'])} per token, instead of "
            f"{last['tokens_per_s']:,.0f} at {duration(last['tpot_s'])}."
        )

    def _no_knee(self, rows: Sequence[Row], gain: float) -> str:
        first, last = rows[0], rows[-1]
        words, completed = "No knee was found", f"{last['requests_per_s']:.2f} requests/s"
        if not self.paced:
            still = "" if gain < FLAT else "still "
            return (
                f"{words} up to {last['load']:g} requests in flight: {completed}; the last "
                f"doubling {still}gained {gain:+.0%}."
            )
        if last_followed([first["offered_per_s"]], [first["requests_per_s"]]) is None:
            return (
                f"{words}: already {first['load']:g} requests/s offered were too many, "
                f"{first['requests_per_s']:.2f} were completed."
            )
        return f"{words} up to {last['load']:g} requests/s offered: {completed}."

    def plot(self, rows: Sequence[Row]) -> str:
        x = Axis("requests per second offered" if self.paced else "requests in flight", count_label)
        note = (self.facts["knee_load"], "knee") if self.facts["knee_load"] else None
        times = [
            line("TTFT p50", rows, "load", "ttft_s"),
            line("TTFT p99", rows, "load", "ttft_p99_s"),
            line("time per output token p50", rows, "load", "tpot_s"),
        ]
        times = [series for series in times if series.points]
        throughput = [line("throughput", rows, "load", "tokens_per_s")]
        tokens = Axis("output tokens per second", count_label, log=False)
        return document(
            Panel(throughput, x, tokens, note),
            Panel(times, x, Axis("time"), note),
        )


def _row(
    load: PlayedLoad, steady: Sequence[Reply], level: float, per_s: float, tokens_per_s: float
) -> Row:
    samples = load.samples
    times = ttfts(steady) or ttfts(load.seen)
    return {
        "load": level,
        "requests_per_s": per_s,
        "tokens_per_s": tokens_per_s,
        "steady": len(times),
        "ttft_s": median(times),
        "ttft_p95_s": percentile(times, 95),
        "ttft_p99_s": percentile(times, 99),
        "tpot_s": median([reply.tpot_s for reply in steady if reply.tpot_s is not None] or [0.0]),
        "running": max((sample.running for sample in samples), default=None),
        "waiting": max((sample.waiting for sample in samples), default=None),
        "kv_share": max((sample.kv_share for sample in samples), default=None),
        "seats": seats_seen(samples),
        "rejected": load.count("rejected"),
        "failed": load.count("failed"),
        "verdict": load.verdict,
    }


def seats_seen(samples: Sequence[GaugeSample]) -> int | None:
    """The most running requests while others waited with free KV cache, or None.

    Only max_num_seqs keeps them waiting then. Prefills keep requests waiting too, so the number
    counts only if three samples show it.
    """
    running = [sample.running for sample in samples if sample.waiting and sample.kv_share < KV_FULL]
    most = max(running, default=0)
    return most if running.count(most) >= 3 else None
