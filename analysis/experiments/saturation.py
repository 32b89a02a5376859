"""The study `saturation`: how throughput follows load, where it bends, and what limits it there."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from forebay.analysis.experiments.http_way import http_ways
from forebay.analysis.experiments.knee import (
    FLAT,
    FLAT_THROUGHOUT,
    FOLLOWING,
    KNEEDLE,
    gain_of_last_doubling,
    is_flat,
    kneedle,
    last_followed,
)
from forebay.analysis.experiments.load_stats import doubted
from forebay.analysis.experiments.one_load import Requests, at_concurrency, at_rate
from forebay.analysis.experiments.plot import Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import Batched, Seed, Study, integers, numbers, study
from forebay.analysis.experiments.target import SIM, sim_config
from forebay.analysis.experiments.ways import IN_TURN, SimWay, Way
from forebay.analysis.units import duration, ratio
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.errors import InputError

HELP = """Throughput against load: where the knee is (T_sat), and max_num_seqs, read
or inferred.

Keeps 1, 2, 4 ... requests in flight (or, with --rates, sends so many a
second) and says where more load stops to bring more throughput. A sim:
target is one engine.

Example:  forebay experiment saturation --target sim:phi-3-mini@h200-nvl --out runs/saturation
"""
LEVELS = "1,2,4,8,16,32,64,128,256,512"
COLUMNS = (
    Column("load", "in flight", "count"),
    Column("requests_per_s", "completed", "rate"),
    Column("tokens_per_s", "tokens/s", "count"),
    Column("ttft_s", "TTFT p50"),
    Column("tpot_s", "TPOT p50"),
    Column("ttft_p90_s", "TTFT p90", shown=False),
    Column("running", "running", "count"),
    Column("waiting", "waiting", "count", shown=False),
    Column("kv_share", "KV", "share"),
    Column("rejected", "rejected", "count", shown=False),
    Column("verdict", "verdict", "text", shown=False),
)


@study("saturation")
def command(
    asked: Study,
    concurrency: Annotated[str, typer.Option(help="Requests in flight; k is 1,024.")] = LEVELS,
    rates: Annotated[
        str | None, typer.Option(help="Instead: requests a second, Poisson, such as 1,2,4,8.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of every request.")] = 1000,
    output_tokens: Annotated[int, typer.Option(min=2, help="Of a request, ± half of it.")] = 200,
    seconds: Annotated[float, typer.Option(min=30, help="Of each rate of --rates.")] = 120.0,
    max_num_batched_tokens: Batched = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Of a sim: target; default: 256.")
    ] = None,
    seed: Seed = 0,
) -> None:
    levels = [float(n) for n in integers(concurrency, "--concurrency")]
    if rates is not None:
        levels = numbers(rates, "--rates")
    if len(levels) < 3:
        raise InputError("--concurrency, --rates: give 3 loads or more, a knee lies between two")

    async def work() -> Result:
        way = await _way(asked, max_num_batched_tokens, max_num_seqs)
        room = way.about.context
        if room is not None and prompt_tokens + output_tokens * 3 // 2 > room:
            raise InputError(f"--prompt-tokens {prompt_tokens}: with its output over {room}")
        made = Requests(prompt_tokens, output_tokens, seed)
        rows = []
        for level in levels:
            if rates is None:
                rows.append(await at_concurrency(way, made, int(level)))
            else:
                rows.append(await at_rate(way, made, level, seconds))
        settings = asked.settings(
            seed=seed, prompt_tokens=prompt_tokens, output_tokens=output_tokens
        )
        return result(way, rows, rates is not None, settings)

    asked.finish(work())


async def _way(asked: Study, batched: int | None, seats: int | None) -> Way:
    (target,) = asked.targets
    if target.startswith(SIM):
        config = sim_config(target, asked.gpu, batched, seats)
        return SimWay(IN_TURN, Scenario(config, 1, DIRECT), target, watched=True)
    (way,) = await http_ways(asked, [("target", [target])], ())
    return way


def max_num_seqs(way: Way, rows: Sequence[dict[str, Any]]) -> tuple[int | None, str]:
    """The engine's seats and how they are known."""
    if way.max_num_seqs is not None:
        return way.max_num_seqs, "read from the configuration"
    seen = [row["seats"] for row in rows if row["seats"]]
    if len(seen) >= 2 and seen[-1] == seen[-2]:  # twice the load and no more running
        return seen[-1], "inferred: never more ran while others waited and KV cache was free"
    if all(row["running"] is None for row in rows):
        return None, "unknown: the target shows no vLLM metrics (a proxy does not pass them on)"
    return None, "not reached at these loads"


def result(way: Way, rows: list[dict[str, Any]], paced: bool, settings: dict[str, Any]) -> Result:
    loads = [row["offered_per_s"] if paced else row["load"] for row in rows]
    came = [row["requests_per_s"] for row in rows]
    at = last_followed(loads, came) if paced else kneedle(loads, came)
    rule = FOLLOWING if paced else KNEEDLE
    gain = gain_of_last_doubling([row["load"] for row in rows], came)
    if not paced and gain < FLAT and is_flat(came):  # no bend: the plateau was there from the start
        at, rule = 0, FLAT_THROUGHOUT
    reached = at is not None and (at < len(rows) - 1 if paced else gain < FLAT)
    seats, how = max_num_seqs(way, rows)
    facts: dict[str, Any] = {
        "knee_load": rows[at]["load"] if reached and at is not None else None,
        "t_sat_requests_per_s": came[at] if reached and at is not None else None,
        "t_sat_tokens_per_s": rows[at]["tokens_per_s"] if reached and at is not None else None,
        "knee_rule": rule,
        "last_doubling_gain": gain if gain != float("inf") else None,
        "max_num_seqs": seats,
        "max_num_seqs_known": how,
    }
    notes = [f"knee: {rule}", f"max_num_seqs: {seats or 'unknown'} ({how})"]
    failed = sum(row["failed"] for row in rows)
    if failed:
        notes.append(f"{failed} requests failed and count as not completed")
    columns = [_heading(column, paced) for column in COLUMNS]
    words = _sentence(rows, at if reached else None, gain, paced)
    words = doubted(words, notes, rows, "load")
    plot = _plot(rows, facts, paced)
    return Result("saturation", way.about.name, words, columns, rows, facts, plot, notes, settings)


def _heading(column: Column, paced: bool) -> Column:
    return Column("load", "offered", "rate") if paced and column.key == "load" else column


def _sentence(rows: list[dict[str, Any]], at: int | None, gain: float, paced: bool) -> str:
    last, unit = rows[-1], "requests/s offered" if paced else "requests in flight"
    if at is None and paced and last_followed(
        [row["offered_per_s"] for row in rows], [row["requests_per_s"] for row in rows]
    ) is None:  # fmt: skip
        first = rows[0]
        return (
            f"No knee was found: already {first['load']:g} {unit} were too many, "
            f"{first['requests_per_s']:.2f} were completed."
        )
    if at is None:
        still = "" if gain < FLAT else "still "
        rise = "" if paced else f"; the last doubling {still}brought {gain:+.0%}"
        return (
            f"No knee was found up to {last['load']:g} {unit}: "
            f"{last['requests_per_s']:.2f} requests/s{rise}."
        )
    knee = rows[at]
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
    return f"{words}; {last['load']:g} bring {more:+.0%} throughput and {later} the TTFT."


def _plot(rows: list[dict[str, Any]], facts: dict[str, Any], paced: bool) -> str:
    x = Axis("requests a second offered" if paced else "requests in flight", count_label)
    note = (facts["knee_load"], "knee") if facts["knee_load"] else None
    came = [(row["load"], row["requests_per_s"]) for row in rows]
    first = [(row["load"], row["ttft_s"]) for row in rows]
    each = [(row["load"], row["tpot_s"]) for row in rows if row["tpot_s"]]
    per_s = Axis("completed requests a second", count_label, log=False)
    return document(
        Panel([Series("throughput", came, came)], x, per_s, note),
        Panel(
            [Series("TTFT p50", first, first), Series("time per output token p50", each, each)],
            x, Axis("time"), note,
        ),
    )  # fmt: skip
