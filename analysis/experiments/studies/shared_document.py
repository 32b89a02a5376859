"""The study `shared-document`: how often a document is computed that many users ask about."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.gauges import GaugeSample
from forebay.analysis.experiments.load_stats import doubted, hit_ratio, ttfts
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import Batched, Engines, Gpus, Seed, Study, study
from forebay.analysis.experiments.system_from_options import ways_of
from forebay.analysis.experiments.systems import PROXY, PlayedLoad, Way
from forebay.analysis.statistics.units import duration, ratio
from forebay.traces.errors import InputError
from forebay.traces.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.synth.documents import SharedDocument, shared_document

HELP = """Many users, one document: TTFT cold and cached, hit ratio, and KV use.

One user asks alone, then the others together, then one more alone. At last
all ask together about a second document. A sim: target runs without the proxy
(round robin) and with it. --engine also measures the engines behind a URL.

Example:  forebay experiment shared-document --target sim:llama-3-8b@h200 --out runs/shared
"""
FIRST, OTHERS, ALONE, AT_ONCE = "first", "the others", "one more", "all at once"
PHASES = (FIRST, OTHERS, ALONE, AT_ONCE)
OTHER_DOCUMENT = 1 << 32  # added to block ids: a text that shares nothing with the first
FLAT = 0.05  # share of a copy: KV use that grows less with each user is flat
COLUMNS = (
    Column("way", "way", "text"),
    Column("phase", "who asks", "text"),
    Column("users", "users", "count", shown=False),
    Column("cold", "cold", "count"),
    Column("ttft_s", "TTFT p50"),
    Column("ttft_max_s", "worst"),
    Column("hit_ratio", "hits", "share"),
    Column("kv_tokens", "KV tokens", "count"),
    Column("kv_copies", "copies", "count"),
    Column("kv_tokens_per_user", "per user", "count"),
    Column("failed", "failed", "count", shown=False),
    Column("verdict", "verdict", "text", shown=False),
)


@dataclass(frozen=True, slots=True)
class KvUse:
    """The KV cache in use on all engines at one moment.

    Attributes:
        running: requests that run.
        tokens: KV tokens in use, by engine.
    """

    running: int
    tokens: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.tokens)

    def copies(self, document_tokens: int) -> int:
        """Return the number of engines on which at least half of the document is in use."""
        return sum(tokens >= document_tokens / 2 for tokens in self.tokens)

    def per_user(self, document_tokens: int) -> float:
        """Return the tokens per request, without one copy of the document on each engine."""
        beside = sum(max(0, tokens - document_tokens) for tokens in self.tokens)
        return beside / self.running if self.running else 0.0


@study("shared-document")
def command(
    options: Study,
    engine: Engines = None,
    users: Annotated[int, typer.Option(min=3, help="Users who ask about it.")] = 50,
    document_tokens: Annotated[
        int, typer.Option(min=BLOCK_TOKENS, help="Tokens of the document, rounded up to 512.")
    ] = 60_000,
    question_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each user's own question.")
    ] = 64,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    apart: Annotated[
        float, typer.Option(min=0, help="Seconds between users who ask together.")
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
        ways = await ways_of(options, engine, gpus, max_num_batched_tokens, watched=True)
        rows, loads = [], {}
        for way in ways:
            room = way.about.context
            if room is not None and longest > room:
                raise InputError(
                    f"--document-tokens {document_tokens}: {way.name} takes at most {room} tokens"
                )
            loads[way.name] = await way.play("shared", *phases)
            rows += [
                table_row(way, phase, load, document_tokens)
                for phase, load in zip(PHASES, loads[way.name], strict=True)
            ]
        settings = options.settings(seed=seed, users=users, document_tokens=document_tokens)
        return result(ways, rows, loads, settings)

    options.finish(work())


def requests(
    users: int, document_tokens: int, question_tokens: int, output_tokens: int, seed: int
) -> list[list[TraceRequest]]:
    """The requests of each phase. The last phase is about another document."""
    rows = list(
        shared_document(
            SharedDocument(
                users=users + 1,
                document_tokens=document_tokens,
                question_tokens=question_tokens,
                output_tokens=output_tokens,
                seed=seed,
            )
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


def table_row(way: Way, phase: str, load: PlayedLoad, document_tokens: int) -> dict[str, Any]:
    """The row of a phase. Cold counts users with a cache hit of less than half the document."""
    answered = [reply for reply in load.seen if reply.ok]
    if any(reply.cached_tokens is None for reply in answered):
        raise InputError(
            f"--target {way.about.name}: does not report cached tokens; start vLLM with "
            "--enable-prompt-tokens-details"
        )
    times = ttfts(load.seen)
    most = max(kv_use(way, load.samples), key=lambda use: use.total, default=None)
    shared = whole_blocks(document_tokens)
    return {
        "way": way.name,
        "phase": phase,
        "users": len(load.seen),
        "cold": sum((reply.cached_tokens or 0) < document_tokens / 2 for reply in answered),
        "ttft_s": median(times),
        "ttft_max_s": max(times),
        "hit_ratio": hit_ratio(load.seen),
        "kv_tokens": most and most.total,
        "kv_copies": most and most.copies(shared),
        "kv_tokens_per_user": most and most.per_user(shared),
        "failed": len(load.seen) - len(answered),
        "verdict": load.verdict,
    }


def whole_blocks(document_tokens: int) -> int:
    """Return the length of the document in the prompts, rounded up as HELP says."""
    return -(-document_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def kv_use(way: Way, samples: Sequence[GaugeSample]) -> list[KvUse]:
    """Return the KV cache in use on all engines, one entry per sample. Empty if unknown."""
    names = list(dict.fromkeys(sample.engine for sample in samples))
    if len(way.pools) < len(names) or not names:
        return []
    tokens = {
        name: (pool.blocks - 1) * pool.block_tokens
        for name, pool in zip(names, way.pools, strict=False)
    }
    latest: dict[str, GaugeSample] = {}
    uses = []
    for sample in sorted(samples, key=lambda sample: sample.at_s):
        latest[sample.engine] = sample
        running = sum(s.running for s in latest.values())
        used = tuple(round(s.kv_share * tokens[s.engine]) for s in latest.values())
        uses.append(KvUse(running, used))
    return uses


def result(
    ways: Sequence[Way],
    rows: list[dict[str, Any]],
    loads: dict[str, list[PlayedLoad]],
    settings: dict[str, Any],
) -> Result:
    way = next((candidate for candidate in ways if candidate.name == PROXY), ways[-1])
    of = {row["phase"]: row for row in rows if row["way"] == way.name}
    first, others = (loads[way.name][n].seen[0].request for n in range(2))
    facts = _facts(of, first, shared_tokens(first, others))
    words = _sentence(f" ({way.name})" if len(ways) > 1 else "", facts, of[OTHERS]["users"] + 1)
    words += _cold_elsewhere(rows, way.name)
    notes = []
    if facts["kv_tokens_per_added_user"] is None:
        notes.append("KV use is unknown without vLLM metrics; name the engines with --engine")
    if failed := sum(row["failed"] for row in rows):
        notes.append(f"{failed} requests were rejected or failed and are in no other column")
    words = doubted(words, notes, rows, "way", "phase")
    target = ", ".join(dict.fromkeys(way.about.name for way in ways))
    columns = [c for c in COLUMNS if c.key != "way" or len(ways) > 1]
    plot = _plot(ways, loads)
    return Result("shared-document", target, words, columns, rows, facts, plot, notes, settings)


def _cold_elsewhere(rows: Sequence[dict[str, Any]], name: str) -> str:
    """How often the other ways than `name` computed the document."""
    cold: dict[str, int] = {}
    for row in rows:
        if row["way"] != name and row["phase"] in (FIRST, OTHERS):
            cold[row["way"]] = cold.get(row["way"], 0) + row["cold"]
    return "".join(f" {way[0].upper()}{way[1:]}: {count} cold." for way, count in cold.items())


def shared_tokens(request: TraceRequest, other: TraceRequest) -> int:
    """Return the tokens with which both prompts begin."""
    count = 0
    for mine, theirs in zip(request.blocks or (), other.blocks or (), strict=False):
        if mine != theirs:
            break
        count += 1
    return min(count * request.block_tokens, request.input_tokens)


def _facts(of: dict[str, dict[str, Any]], request: TraceRequest, shared: int) -> dict[str, Any]:
    """The figures of one way from its rows by phase.

    KV use is flat if a user adds hardly more than the own question and answer. A copy of the
    document on another engine belongs to no user and is counted apart.
    """
    first, others, alone = of[FIRST], of[OTHERS], of[ALONE]
    own = request.input_tokens + request.output_tokens - shared
    grown = others["kv_tokens_per_user"]
    return {
        "cold": first["cold"] + others["cold"],
        "cold_at_once": of[AT_ONCE]["cold"],
        "ttft_cold_s": first["ttft_s"],
        "ttft_cached_s": None if alone["cold"] else alone["ttft_s"],
        "ttft_cached_beside_others_s": others["ttft_s"],
        "cold_over_cached": None if alone["cold"] else first["ttft_s"] / alone["ttft_s"],
        "hit_ratio_of_the_others": others["hit_ratio"],
        "kv_tokens_per_added_user": grown,
        "kv_document_copies": others["kv_copies"],
        "kv_document_copies_at_once": of[AT_ONCE]["kv_copies"],
        "kv_tokens_per_user_at_once": of[AT_ONCE]["kv_tokens_per_user"],
        "kv_flat": None if grown is None else grown < own + FLAT * shared,
        "document_tokens": shared,
        "own_tokens": own,
        "prompt_tokens": request.input_tokens,
    }


def _sentence(way: str, facts: dict[str, Any], users: int) -> str:
    cold, faster = facts["cold"], facts["cold_over_cached"]
    if cold > users / 2:
        return (
            f"The document was not shared: {cold} of {users} users waited for its whole prefill"
            f"{way}; is prefix caching on?"
        )
    words = f"The document was computed for {cold} of {users} users{way}. TTFT is "
    words += f"{duration(facts['ttft_cold_s'])} cold, with "
    if faster is None:
        words += "no cache hit for a single later user"
    else:
        words += f"a cache hit {duration(facts['ttft_cached_s'])} ({ratio(faster)} shorter)"
    words += (
        f". The others ask together: their median is "
        f"{duration(facts['ttft_cached_beside_others_s'])}, and they find "
        f"{facts['hit_ratio_of_the_others']:.1%} of their tokens cached"
    )
    words += _kv_words(facts)
    at_once = "once" if facts["cold_at_once"] == 1 else f"{facts['cold_at_once']} times"
    return f"{words}. When all asked at once, the document was computed {at_once}."


def _kv_words(facts: dict[str, Any]) -> str:
    """The verdict on KV use: copies of the document, and growth per user without them."""
    grown, copies = facts["kv_tokens_per_added_user"], facts["kv_document_copies"]
    if grown is None:
        return ""
    flat = "stayed flat" if facts["kv_flat"] else "did not stay flat"
    held = "one engine holds a copy" if copies == 1 else f"{copies} engines hold a copy each"
    return (
        f". KV use {flat}: {held} of the document ({facts['document_tokens']:,} tokens). Each user "
        f"adds {grown:,.0f} tokens, where the own question and answer have "
        f"{facts['own_tokens']:,} and a copy would take {facts['prompt_tokens']:,}"
    )


def _plot(ways: Sequence[Way], loads: dict[str, list[PlayedLoad]]) -> str:
    waits, used, most = [], [], 1
    for way in ways:
        first, others, _, at_once = loads[way.name]
        for name, of in (("one first", [*first.seen, *others.seen]), ("at once", at_once.seen)):
            points = [(float(place), time) for place, time in enumerate(sorted(ttfts(of)), start=1)]
            waits.append(Series(f"{way.name}, {name}", points))
            most = max(most, len(of))
        peaks: dict[int, float] = {}
        for use in kv_use(way, others.samples):
            if use.running:
                peaks[use.running] = max(peaks.get(use.running, 0.0), use.total)
        if peaks:
            used.append(Series(way.name, [(float(n), t) for n, t in sorted(peaks.items())]))
    panels = [
        Panel(waits, Axis("users, fastest first", count_label, log=False), Axis("TTFT")),
    ]
    if used:
        row = loads[ways[0].name][0].seen[0].request
        copies = [(float(n), float(n * row.input_tokens)) for n in range(1, most + 1)]
        used.append(Series("one copy per user", (), copies))
        x = Axis("users served at once", count_label, log=False)
        panels.append(Panel(used, x, Axis("KV tokens in use", count_label)))
    return document(*panels)
