"""The study `saturation`: throughput against load, its knee, and the limit reached there."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.http_system import http_ways
from forebay.analysis.experiments.load_stats import doubted
from forebay.analysis.experiments.one_load import Requests, at_concurrency, at_rate
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import (
    Batched,
    PromptTokens,
    Seed,
    Study,
    integers,
    numbers,
    study,
)
from forebay.analysis.experiments.systems import IN_TURN, SimWay, Way
from forebay.analysis.experiments.target import SIM
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
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.command_line.options import a_time
from forebay.traces.errors import InputError

HELP = """Throughput against load: the knee, max_num_seqs, and the value to give it.

Keeps 1, 2, 4 ... requests in flight, or offers the rates of --rates, and
finds the load above which throughput no longer grows. A sim: target is one
engine, with which the advised max_num_seqs is tried.

Example:  forebay experiment saturation --target sim:phi-3-mini@h200-nvl --out runs/saturation
"""
LEAST_URL, LEAST_SIM = 24, 200
LEVELS = "1,2,4,8,16,32,64,128,256,512"
COLUMNS = (
    Column("load", "in flight", "count"),
    Column("requests_per_s", "completed", "rate"),
    Column("tokens_per_s", "tokens/s", "count"),
    Column("ttft_s", "TTFT p50"),
    Column("ttft_p95_s", "p95"),
    Column("ttft_p99_s", "p99"),
    Column("tpot_s", "TPOT p50"),
    Column("running", "running", "count", shown=False),
    Column("waiting", "waiting", "count", shown=False),
    Column("kv_share", "KV", "share", shown=False),
    Column("rejected", "rejected", "count", shown=False),
    Column("verdict", "verdict", "text", shown=False),
    Column("knee", "", "text"),
)


@study("saturation")
def command(
    options: Study,
    concurrency: Annotated[str, typer.Option(help="Requests in flight; k is 1,024.")] = LEVELS,
    rates: Annotated[
        str | None, typer.Option(help="Requests per second, Poisson, instead: 1,2,4,8.")
    ] = None,
    prompt_tokens: PromptTokens = 1000,
    output_tokens: Annotated[
        int, typer.Option(min=2, help="Mean output tokens; each request ± 50 %.")
    ] = 200,
    duration: Annotated[
        float, a_time("Time of each rate of --rates.", "--duration", least_s=30)
    ] = 120.0,
    max_num_batched_tokens: Batched = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Only for a sim: target; default: 256.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Fewest requests of a load: a p95 needs 200, a p99 1000; default: 24, "
            "for a sim: target 200.",
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    least = requests or (LEAST_SIM if options.targets[0].startswith(SIM) else LEAST_URL)
    levels = [float(n) for n in integers(concurrency, "--concurrency")]
    if rates is not None:
        levels = numbers(rates, "--rates")
    if len(levels) < 3:
        raise InputError("--concurrency, --rates: give 3 loads or more: a knee lies between two")

    async def work() -> Result:
        way = await _way(options, max_num_batched_tokens, max_num_seqs)
        room = way.about.context
        if room is not None and prompt_tokens + output_tokens * 3 // 2 > room:
            raise InputError(
                f"--prompt-tokens {prompt_tokens}: longer than {room} tokens with its output"
            )
        # All loads share one source of prompts, so that no load finds another's in the cache.
        maker = Requests(prompt_tokens, output_tokens, seed, least)
        rows = []
        for level in levels:
            if rates is None:
                rows.append(await at_concurrency(way, maker, int(level)))
            else:
                rows.append(await at_rate(way, maker, level, duration))
        settings = options.settings(
            seed=seed, prompt_tokens=prompt_tokens, output_tokens=output_tokens
        )
        # The largest load, run again, shows the effect of the advice.
        tried = None
        advice = None if rates else _worth_trying(way, rows)
        if advice is not None:
            advised = await _way(options, max_num_batched_tokens, advice)
            tried = await at_concurrency(advised, maker, int(levels[-1]))
        return result(way, rows, rates is not None, settings, tried)

    options.finish(work())


def _worth_trying(way: Way, rows: Sequence[dict[str, Any]]) -> int | None:
    """The load of the knee, if it is below the last load and a simulated engine can be given it."""
    at, _, _ = _knee(rows, False)
    if at is None or at == len(rows) - 1 or not isinstance(way, SimWay):
        return None
    seats = int(rows[at]["load"])
    return None if seats == way.max_num_seqs else seats


async def _way(options: Study, batched: int | None, seats: int | None) -> Way:
    (target,) = options.targets
    if target.startswith(SIM):
        config = options.engine(target, batched, seats)
        return SimWay(IN_TURN, Scenario(config, 1, DIRECT), target, watched=True)
    (way,) = await http_ways(options, [("target", [target])], ())
    return way


def max_num_seqs(way: Way, rows: Sequence[dict[str, Any]]) -> tuple[int | None, str]:
    """The engine's max_num_seqs (None if unknown), and how it is known."""
    if way.max_num_seqs is not None:
        return way.max_num_seqs, "read from the configuration"
    seen = [row["seats"] for row in rows if row["seats"]]
    if len(seen) >= 2 and seen[-1] == seen[-2]:  # more load, but no more running
        return seen[-1], "inferred: the most that ran while others waited and KV cache was free"
    if all(row["running"] is None for row in rows):
        return None, "unknown: the target has no vLLM metrics (a proxy does not pass them on)"
    return None, "not reached at these loads"


def result(
    way: Way, rows: list[dict[str, Any]], paced: bool, settings: dict[str, Any],
    tried: dict[str, Any] | None = None,
) -> Result:  # fmt: skip
    """Find the knee of the rows. `tried` is the largest load with the advised max_num_seqs."""
    at, rule, gain = _knee(rows, paced)
    knee = None if at is None else rows[at]
    for row in rows:
        row["knee"] = "knee" if row is knee else ""
    seats, how = max_num_seqs(way, rows)
    facts: dict[str, Any] = {
        "knee_load": knee and knee["load"],
        "t_sat_requests_per_s": knee and knee["requests_per_s"],
        "t_sat_tokens_per_s": knee and knee["tokens_per_s"],
        "knee_rule": rule,
        "last_doubling_gain": gain if gain != float("inf") else None,
        "max_num_seqs": seats,
        "max_num_seqs_known": how,
        "advised_max_num_seqs": None if paced or knee is None else int(knee["load"]),
        "with_advised": tried,
    }
    notes = [f"knee: {rule}", f"max_num_seqs: {seats or 'unknown'} ({how})", *_remarks(rows)]
    columns = [_heading(column, paced) for column in COLUMNS if knee or column.key != "knee"]
    sentence = _sentence(rows, at, gain, paced) + _advice(facts, rows[-1], tried)
    words = doubted(sentence, notes, rows, "load")
    plot = _plot(rows, facts, paced)
    return Result("saturation", way.about.name, words, columns, rows, facts, plot, notes, settings)


def _remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    notes = []
    if failed := sum(row["failed"] for row in rows):
        notes.append(f"{failed} requests failed and count as not completed")
    if rows[0].get("ttft_p99_s") is None:
        notes.append("a p95 needs 200 requests of a load and a p99 1,000: --requests 1000")
    return notes


def _knee(rows: Sequence[dict[str, Any]], paced: bool) -> tuple[int | None, str, float]:
    """Index of the knee (None if not reached), its rule, and the gain of the last doubling."""
    completed = [row["requests_per_s"] for row in rows]
    gain = gain_of_last_doubling([row["load"] for row in rows], completed)
    if paced:
        at = last_followed([row["offered_per_s"] for row in rows], completed)
        # Nothing beyond the last rate was tried, so it is no knee.
        return None if at == len(rows) - 1 else at, FOLLOWING, gain
    if gain < FLAT and is_flat(completed):
        return 0, FLAT_THROUGHOUT, gain
    return kneedle([row["load"] for row in rows], completed) if gain < FLAT else None, KNEEDLE, gain


def _heading(column: Column, paced: bool) -> Column:
    return Column("load", "offered", "rate") if paced and column.key == "load" else column


def _sentence(rows: list[dict[str, Any]], at: int | None, gain: float, paced: bool) -> str:
    if at is None:
        return _no_knee(rows, gain, paced)
    knee, last = rows[at], rows[-1]
    unit = "requests/s offered" if paced else "requests in flight"
    since = "already at the first load," if knee is rows[0] and not paced else "from"
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


def _advice(facts: dict[str, Any], last: dict[str, Any], tried: dict[str, Any] | None) -> str:
    """Describe the effect of the advised max_num_seqs at the largest load. Empty without advice."""
    if facts["advised_max_num_seqs"] is None:
        return ""
    words = f" Give --max-num-seqs {facts['advised_max_num_seqs']}"
    if tried is None:
        return words + "."
    return (
        f"{words}: {last['load']:g} in flight then have {tried['tokens_per_s']:,.0f} output "
        f"tokens/s at {duration(tried['tpot_s'])} per token, instead of "
        f"{last['tokens_per_s']:,.0f} at {duration(last['tpot_s'])}."
    )


def _no_knee(rows: list[dict[str, Any]], gain: float, paced: bool) -> str:
    first, last = rows[0], rows[-1]
    if not paced:
        still = "" if gain < FLAT else "still "
        return (
            f"No knee was found up to {last['load']:g} requests in flight: "
            f"{last['requests_per_s']:.2f} requests/s; the last doubling {still}gained {gain:+.0%}."
        )
    if last_followed([first["offered_per_s"]], [first["requests_per_s"]]) is None:
        return (
            f"No knee was found: already {first['load']:g} requests/s offered were too many, "
            f"{first['requests_per_s']:.2f} were completed."
        )
    return (
        f"No knee was found up to {last['load']:g} requests/s offered: "
        f"{last['requests_per_s']:.2f} requests/s."
    )


def _plot(rows: list[dict[str, Any]], facts: dict[str, Any], paced: bool) -> str:
    x = Axis("requests per second offered" if paced else "requests in flight", count_label)
    note = (facts["knee_load"], "knee") if facts["knee_load"] else None

    def of(key: str) -> list[tuple[float, float]]:
        return [(row["load"], row[key]) for row in rows if row.get(key)]

    tokens, times = of("tokens_per_s"), {"TTFT p50": "ttft_s", "TTFT p99": "ttft_p99_s"}
    times["time per output token p50"] = "tpot_s"
    series = [Series(name, points, points) for name, key in times.items() if (points := of(key))]
    return document(
        Panel(
            [Series("throughput", tokens, tokens)],
            x, Axis("output tokens per second", count_label, log=False), note,
        ),
        Panel(series, x, Axis("time"), note),
    )  # fmt: skip
