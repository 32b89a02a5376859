"""`hol --fleet`: chats next to long documents, with and without the proxy and chunked prefill."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from forebay.analysis.charts.panels import Axis, Panel, Series, share_label
from forebay.analysis.charts.panels import document as drawn
from forebay.analysis.experiments.http_system import http_ways
from forebay.analysis.experiments.load_stats import doubted, percentile, ttfts
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import Study
from forebay.analysis.experiments.systems import IN_TURN, PROXY, PlayedLoad, SimWay, Way
from forebay.analysis.experiments.target import SIM, StudyFailed
from forebay.analysis.statistics.units import duration
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.lengths import Fixed

WHOLE, CHUNKED, THEIRS = "whole", "chunked", "as the servers are"
ALIKE = 0.1  # a smaller relative difference of stalls is called "does not change"
REJECTED_SHARE = 0.01  # above this share, the sentence also states how many were rejected
STALL_S = 0.5  # a gap between two tokens that a reader notices as a pause
CURVE_POINTS = 100
COLUMNS = (
    Column("way", "way", "text"),
    Column("prefill", "prefill", "text"),
    Column("stall_s", "worst stall"),
    Column("stalled_share", "stalled", "share"),
    Column("stall_p99_s", "stall p99", shown=False),
    Column("ttft_p50_s", "chat TTFT p50", shown=False),
    Column("ttft_p99_s", "chat p99"),
    Column("document_ttft_s", "document"),
    Column("rejected", "rejected", "count"),
    Column("chats", "chats", "count", shown=False),
    Column("documents", "documents", "count", shown=False),
    Column("failed", "failed", "count", shown=False),
    Column("verdict", "verdict", "text", shown=False),
)


def requests(
    prompt_tokens: int, chat_rate: float, document_rate: float, seconds: float, seed: int
) -> list[TraceRequest]:
    """Chats with Azure's lengths, and documents of `prompt_tokens` with five questions each."""
    spec = ChatBesideDocuments(
        chat_rate_per_s=chat_rate,
        document_rate_per_s=document_rate,
        document_tokens=Fixed(prompt_tokens),
        duration_s=seconds,
        seed=seed,
    )
    rows = list(chat_beside_documents(spec))
    if not any(row.document for row in rows) or all(row.document for row in rows):
        raise InputError(f"--duration {seconds:g}: no chat or no document arrives; raise it")
    return [replace(row, arrival_s=row.arrival_s - rows[0].arrival_s) for row in rows]


async def fleet_study(
    options: Study, engines: Sequence[str] | None, gpus: int, rows: Sequence[TraceRequest],
    prompt_tokens: int, settings: dict[str, Any],
) -> Result:  # fmt: skip
    """Run the trace `rows` on every way. Raises InputError if a request does not fit."""
    table, loads = [], {}
    for prefill, way in await _ways(options, engines, gpus):
        room = way.about.context
        longest = max(row.input_tokens + row.output_tokens for row in rows)
        if room is not None and longest > room:
            raise InputError(
                f"--prompt-tokens {prompt_tokens}: {way.about.name} takes at most {room} tokens"
            )
        (load,) = await way.play(f"hol-{prefill}", rows)
        table.append(_table_row(way, prefill, load))
        loads[f"{way.name}, {prefill}" if prefill != THEIRS else way.name] = load
    return _result(options, table, loads, prompt_tokens, settings)


async def _ways(
    options: Study, engines: Sequence[str] | None, gpus: int
) -> Sequence[tuple[str, Way]]:
    (target,) = options.targets
    if not target.startswith(SIM):
        if not engines:
            raise InputError("--fleet: give the URL of each engine behind the proxy with --engine")
        ways = await http_ways(options, [(IN_TURN, engines), (PROXY, [target])], engines)
        return [(THEIRS, way) for way in ways]
    if engines:
        raise InputError("--engine: not with a sim: target, which brings its own engines")
    chunked = options.engine(target)
    pairs: list[tuple[str, Way]] = []
    for prefill, config in ((WHOLE, whole_prompts(chunked)), (CHUNKED, chunked)):
        scenario = Scenario(config, gpus)
        direct = replace(scenario, policy=DIRECT)
        pairs.append((prefill, SimWay(IN_TURN, direct, target, watched=False)))
        pairs.append((prefill, SimWay(PROXY, scenario, target, watched=False)))
    return pairs


def whole_prompts(config: EngineConfig) -> EngineConfig:
    """The same engine without chunked prefill: one step must take a whole context."""
    return replace(config, enable_chunked_prefill=False, max_num_batched_tokens=config.context)


def _table_row(way: Way, prefill: str, load: PlayedLoad) -> dict[str, Any]:
    chats = [reply for reply in load.seen if reply.request.document is None]
    documents = [reply for reply in load.seen if reply.request.document is not None]
    stalls = [reply.stall_s for reply in chats if reply.ok and reply.stall_s is not None]
    waits = ttfts(documents)
    if not stalls or not waits:
        raise StudyFailed(f"{way.name}: no chat or no document was answered")
    return {
        "way": way.name,
        "prefill": prefill,
        "stall_s": max(stalls),
        "stalled_share": sum(stall > STALL_S for stall in stalls) / len(stalls),
        "stall_p99_s": percentile(stalls, 99),
        "ttft_p50_s": percentile(ttfts(chats), 50),
        "ttft_p99_s": percentile(ttfts(chats), 99),
        "document_ttft_s": median(waits),
        "rejected": sum(reply.outcome == "rejected" for reply in load.seen),
        "chats": len(chats),
        "documents": len(documents),
        "failed": sum(reply.outcome == "failed" for reply in load.seen),
        "verdict": load.verdict,
    }


def _result(
    options: Study, rows: list[dict[str, Any]], loads: dict[str, PlayedLoad], prompt_tokens: int,
    settings: dict[str, Any],
) -> Result:  # fmt: skip
    several = len({row["prefill"] for row in rows}) > 1
    beside = f"Beside documents of {prompt_tokens:,} tokens "
    words = beside + " ".join(_compared(rows, prefill) for prefill in _order(rows))
    notes = [
        f"stalled: chats with a gap of more than {STALL_S:g} s between two tokens; chat p99 and "
        "document (median): TTFT; about five questions per document"
    ]
    if any(row["ttft_p99_s"] is None for row in rows):
        notes.append("–: a p99 needs 1,000 answered chats; raise --duration or --chat-rate")
    if any(_rejects(row) for row in rows):
        notes.append("stalls and TTFT are of answered chats only; rejected ones do not count")
    words = doubted(words, notes, rows, "way", "prefill")
    if failed := sum(row["failed"] for row in rows):
        notes.append(f"{failed} requests failed and are in no other column")
    facts = {
        f"worst_stall_s.{row['way']}.{row['prefill']}".replace(" ", "_"): row["stall_s"]
        for row in rows
    }
    columns = [c for c in COLUMNS if several or c.key != "prefill"]
    plot = _plot(loads)
    return Result("hol", options.targets[0], words, columns, rows, facts, plot, notes, settings)


def _order(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(row["prefill"]) for row in reversed(rows)))


def _compared(rows: Sequence[dict[str, Any]], prefill: str) -> str:
    of = {row["way"]: row for row in rows if row["prefill"] == prefill}
    direct, proxy = of[IN_TURN], of[PROXY]
    words = f"the proxy {_verb(proxy['stall_s'], direct['stall_s'])} a chat's worst stall "
    words += (
        f"({duration(proxy['stall_s'])} instead of {duration(direct['stall_s'])}). Of the chats "
    )
    words += f"{proxy['stalled_share']:.1%} stall instead of {direct['stalled_share']:.1%}"
    if proxy["ttft_p99_s"] is not None and direct["ttft_p99_s"] is not None:
        words += f", and their p99 TTFT is {duration(proxy['ttft_p99_s'])} instead of "
        words += duration(direct["ttft_p99_s"])
    if _rejects(proxy) or _rejects(direct):
        words += ". This counts answered chats only: the proxy rejects "
        words += f"{_rejected_share(proxy):.0%} of all requests, {IN_TURN} "
        words += f"{_rejected_share(direct):.0%}"
    first = "with" if prefill == _order(rows)[0] else "With"
    return f"{words}." if prefill == THEIRS else f"{first} {prefill} prefill {words}."


def _rejected_share(row: dict[str, Any]) -> float:
    return float(row["rejected"] / (row["chats"] + row["documents"]))


def _rejects(row: dict[str, Any]) -> bool:
    return _rejected_share(row) > REJECTED_SHARE


def _verb(mine_s: float, theirs_s: float) -> str:
    less = 1 - mine_s / theirs_s if theirs_s > 0 else 0.0
    return "shortens" if less > ALIKE else "lengthens" if less < -ALIKE else "does not change"


def _plot(loads: dict[str, PlayedLoad]) -> str:
    """Plot the share of chats whose worst stall, or TTFT, is at least a given time."""
    panels: list[Panel] = []
    for title, key in (("worst gap between two tokens", "stall_s"), ("TTFT", "ttft_s")):
        series = []
        for name, load in loads.items():
            chats = [reply for reply in load.seen if reply.request.document is None and reply.ok]
            values = sorted(
                v for reply in chats if (v := getattr(reply, key)) is not None and v > 0
            )
            series.append(Series(name, (), _tail(values)))
        x, y = Axis(f"{title} of a chat"), Axis("share of chats at least as long", share_label)
        panels.append(Panel(series, x, y, key_left=True, keyed=not panels))
    return drawn(*panels)


def _tail(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of values at or above it), thinned to the points that a plot needs."""
    count = len(values)
    places = sorted({round(count * (1 - (1 / count) ** (i / CURVE_POINTS))) for i in
                   range(CURVE_POINTS + 1)} | {0, count - 1})  # fmt: skip
    return [(values[i], (count - i) / count) for i in places if i < count]
