"""The study `shared-document`: who pays for a document that many ask about, and who finds it."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Annotated, Any

import typer

from forebay.analysis.experiments.gauges import GaugeSample
from forebay.analysis.experiments.load_stats import doubted, hit_ratio, ttfts
from forebay.analysis.experiments.plot import Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import Batched, Engines, Gpus, Seed, Study, study
from forebay.analysis.experiments.ways import PROXY, PlayedLoad, Way
from forebay.analysis.experiments.ways_of import ways_of
from forebay.analysis.units import duration, ratio
from forebay.traces.errors import InputError
from forebay.traces.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.synth import shared_document

HELP = """Many users, one document: TTFT cold and cached, hit ratio, and KV use that
stays flat.

The first user asks alone, the others all at once after it, one more alone;
then all of them at once about a second document. A sim: target is asked
with the engines in turn and through the proxy; with URLs, --engine asks the
engines behind --target directly, too.

Example:  forebay experiment shared-document --target sim:llama-3-8b@h200 --out runs/shared
"""
FIRST, OTHERS, ALONE, AT_ONCE = "first", "the others", "one more", "all at once"
PHASES = (FIRST, OTHERS, ALONE, AT_ONCE)
OTHER_DOCUMENT = 1 << 32  # added to block ids: text that shares nothing with the first's
COLUMNS = (
    Column("way", "way", "text"),
    Column("phase", "who asks", "text"),
    Column("users", "users", "count", shown=False),
    Column("cold", "cold", "count"),
    Column("ttft_s", "TTFT p50"),
    Column("ttft_max_s", "worst"),
    Column("hit_ratio", "hits", "share"),
    Column("kv_tokens", "KV tokens", "count"),
    Column("failed", "failed", "count", shown=False),
    Column("verdict", "verdict", "text", shown=False),
)


@study("shared-document")
def command(
    asked: Study,
    engine: Engines = None,
    users: Annotated[int, typer.Option(min=3, help="Who ask about it.")] = 50,
    document_tokens: Annotated[
        int, typer.Option(min=BLOCK_TOKENS, help="Rounded up to 512.")
    ] = 60_000,
    question_tokens: Annotated[int, typer.Option(min=1, help="Of each user's own.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 128,
    apart: Annotated[
        float, typer.Option(min=0, help="Seconds between two users who ask at once.")
    ] = 0.02,
    gpus: Gpus = 2,
    max_num_batched_tokens: Batched = None,
    seed: Seed = 0,
) -> None:
    async def work() -> Result:
        phases = [
            [replace(row, arrival_s=number * apart) for number, row in enumerate(phase)]
            for phase in requests(users, document_tokens, question_tokens, output_tokens, seed)
        ]
        longest = phases[0][0].input_tokens + output_tokens
        ways = await ways_of(asked, engine, gpus, max_num_batched_tokens, watched=True)
        rows, loads = [], {}
        for way in ways:
            room = way.about.context
            if room is not None and longest > room:
                raise InputError(f"--document-tokens {document_tokens}: {way.name} holds {room}")
            loads[way.name] = await way.play("shared", *phases)
            rows += [
                told(way, phase, load, document_tokens)
                for phase, load in zip(PHASES, loads[way.name], strict=True)
            ]
        settings = asked.settings(seed=seed, users=users, document_tokens=document_tokens)
        return result(ways, rows, loads, settings)

    asked.finish(work())


def requests(
    users: int, document_tokens: int, question_tokens: int, output_tokens: int, seed: int
) -> list[list[TraceRequest]]:
    """The phases: the first, the others, one more alone; everybody about another document."""
    rows = list(
        shared_document(
            users=users + 1,
            document_tokens=document_tokens,
            question_tokens=question_tokens,
            output_tokens=output_tokens,
            seed=seed,
        )
    )
    others = [
        replace(
            row,
            id=f"second-{row.id}",
            blocks=tuple(block + OTHER_DOCUMENT for block in row.blocks or ()),
        )
        for row in rows[:users]
    ]
    return [rows[:1], rows[1:users], rows[users:], others]


def told(way: Way, phase: str, load: PlayedLoad, document_tokens: int) -> dict[str, Any]:
    """A row; cold is whose document was, for the most part, computed anew."""
    answered = [one for one in load.seen if one.ok]
    if any(one.cached_tokens is None for one in answered):
        raise InputError(
            f"--target {way.about.name}: does not say what was cached; start vLLM with "
            "--enable-prompt-tokens-details"
        )
    times = ttfts(load.seen)
    return {
        "way": way.name,
        "phase": phase,
        "users": len(load.seen),
        "cold": sum((one.cached_tokens or 0) < document_tokens / 2 for one in answered),
        "ttft_s": median(times),
        "ttft_max_s": max(times),
        "hit_ratio": hit_ratio(load.seen),
        "kv_tokens": max((held for _, held in held_tokens(way, load.samples)), default=None),
        "failed": len(load.seen) - len(answered),
        "verdict": load.verdict,
    }


def held_tokens(way: Way, samples: Sequence[GaugeSample]) -> list[tuple[int, float]]:
    """(requests running, KV tokens they hold) over all engines, sample by sample."""
    names = list(dict.fromkeys(one.engine for one in samples))
    if len(way.pools) < len(names) or not names:
        return []
    tokens = {
        name: (pool.blocks - 1) * pool.block_tokens
        for name, pool in zip(names, way.pools, strict=False)
    }
    latest: dict[str, GaugeSample] = {}
    found = []
    for one in sorted(samples, key=lambda one: one.at_s):
        latest[one.engine] = one
        running = sum(s.running for s in latest.values())
        found.append((running, sum(s.kv_share * tokens[s.engine] for s in latest.values())))
    return found


def result(
    ways: Sequence[Way],
    rows: list[dict[str, Any]],
    loads: dict[str, list[PlayedLoad]],
    settings: dict[str, Any],
) -> Result:
    way = next((one for one in ways if one.name == PROXY), ways[-1])
    of = {row["phase"]: row for row in rows if row["way"] == way.name}
    prompt = loads[way.name][0].seen[0].request.input_tokens
    others = of[OTHERS]["users"]
    grown = None
    if of[FIRST]["kv_tokens"] and of[OTHERS]["kv_tokens"]:
        grown = (of[OTHERS]["kv_tokens"] - of[FIRST]["kv_tokens"]) / others
    cold = of[FIRST]["cold"] + of[OTHERS]["cold"]
    facts: dict[str, Any] = {
        "cold": cold,
        "cold_at_once": of[AT_ONCE]["cold"],
        "ttft_cold_s": of[FIRST]["ttft_s"],
        "ttft_cached_s": None if of[ALONE]["cold"] else of[ALONE]["ttft_s"],
        "ttft_cached_beside_others_s": of[OTHERS]["ttft_s"],
        "cold_over_cached": None
        if of[ALONE]["cold"]
        else of[FIRST]["ttft_s"] / of[ALONE]["ttft_s"],
        "hit_ratio_of_the_others": of[OTHERS]["hit_ratio"],
        "kv_tokens_per_added_user": grown,
        "prompt_tokens": prompt,
    }
    words = _sentence(f" ({way.name})" if len(ways) > 1 else "", facts, others + 1)
    for name in (one.name for one in ways if one is not way):
        paid = sum(r["cold"] for r in rows if r["way"] == name and r["phase"] in (FIRST, OTHERS))
        words += f" {name[0].upper()}{name[1:]}: {paid} paid."
    notes = []
    if grown is None:
        notes.append("KV use is unknown: no vLLM metrics there; name the engines with --engine")
    if failed := sum(row["failed"] for row in rows):
        notes.append(f"{failed} requests were refused or failed and are in no other column")
    words = doubted(words, notes, rows, "way", "phase")
    target = ", ".join(dict.fromkeys(one.about.name for one in ways))
    columns = [c for c in COLUMNS if c.key != "way" or len(ways) > 1]
    plot = _plot(ways, loads)
    return Result("shared-document", target, words, columns, rows, facts, plot, notes, settings)


def _sentence(way: str, facts: dict[str, Any], users: int) -> str:
    cold, faster = facts["cold"], facts["cold_over_cached"]
    if cold > users / 2:
        return (
            f"The document was not shared: {cold} of {users} users paid for it in full{way}; "
            "is prefix caching on?"
        )
    words = f"{cold} of {users} users paid for the document{way}: TTFT "
    words += f"{duration(facts['ttft_cold_s'])} cold and "
    if faster is None:
        words += "not found in the cache by one who asked alone later"
    else:
        words += f"{duration(facts['ttft_cached_s'])} cached ({ratio(faster)} less)"
    words += (
        f"; {duration(facts['ttft_cached_beside_others_s'])} for the median of the others all at "
        f"once, {facts['hit_ratio_of_the_others']:.1%} of whose tokens were hits"
    )
    grown = facts["kv_tokens_per_added_user"]
    if grown is not None:
        flat = "stayed flat" if grown < 0.05 * facts["prompt_tokens"] else "did not stay flat"
        words += f"; KV use {flat}: {grown:,.0f} tokens a user more, a copy being "
        words += f"{facts['prompt_tokens']:,}"
    at_once = facts["cold_at_once"]
    return f"{words}. When all asked at once, {at_once} paid."


def _plot(ways: Sequence[Way], loads: dict[str, list[PlayedLoad]]) -> str:
    waits, held, most = [], [], 1
    for way in ways:
        first, others, _, at_once = loads[way.name]
        for name, of in (("one first", [*first.seen, *others.seen]), ("at once", at_once.seen)):
            points = [(float(place), time) for place, time in enumerate(sorted(ttfts(of)), start=1)]
            waits.append(Series(f"{way.name}, {name}", points))
            most = max(most, len(of))
        peaks: dict[int, float] = {}
        for running, tokens in held_tokens(way, others.samples):
            if running:
                peaks[running] = max(peaks.get(running, 0.0), tokens)
        if peaks:
            held.append(Series(way.name, [(float(n), t) for n, t in sorted(peaks.items())]))
    panels = [
        Panel(waits, Axis("users, the fastest first", count_label, log=False), Axis("TTFT")),
    ]
    if held:
        row = loads[ways[0].name][0].seen[0].request
        copies = [(float(n), float(n * row.input_tokens)) for n in range(1, most + 1)]
        held.append(Series("a copy each", (), copies))
        x = Axis("users served at a time", count_label, log=False)
        panels.append(Panel(held, x, Axis("KV tokens held", count_label)))
    return document(*panels)
