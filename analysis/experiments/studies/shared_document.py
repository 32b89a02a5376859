"""The study `shared-document`: how often a document is computed that many users ask about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from statistics import median
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.gauges import GaugeSample
from forebay.analysis.experiments.http_system import measured_by, ways_of
from forebay.analysis.experiments.load_stats import hit_ratio, ttfts
from forebay.analysis.experiments.result import VARIED, Column, Row
from forebay.analysis.experiments.study import Engines, Gpus, Seed, Study
from forebay.analysis.experiments.systems import PROXY, PlayedLoad, Way
from forebay.analysis.statistics.units import duration, ratio
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.synth import documents

FIRST, OTHERS, ALONE, ALL_COLD = "first", "the others", "one more", "all, cold"
PHASES = (FIRST, OTHERS, ALONE, ALL_COLD)
OTHER_DOCUMENT = 1 << 32  # added to block ids: a text that shares nothing with the first
FLAT = 0.05  # share of a copy: KV use that grows less with each user is flat


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


@dataclass(kw_only=True)
class SharedDocumentStudy(Study):
    """Many users, one document: TTFT cold and cached, hit ratio, and KV use.

    One user asks alone, then the others one after another, then one more alone. At
    last all ask about a second document, which no engine holds. A sim: target runs
    without the proxy (round robin) and with it. --engine also measures the engines
    behind a URL.

    Example:  forebay experiment shared-document --target sim:llama-3-8b@h200 --out runs/shared
    """

    NAME = "shared-document"
    COLUMNS = (
        Column("way", "way", "text", when=VARIED),
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
    SETTINGS = ("seed", "users", "document_tokens")
    LOAD_KEYS = ("way", "phase")

    engine: Engines = None
    users: Annotated[int, typer.Option(min=3, help="Users who ask about it.")] = 50
    document_tokens: Annotated[
        int, typer.Option(min=BLOCK_TOKENS, help="Tokens of the document, rounded up to 512.")
    ] = 60_000
    question_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each user's own question.")
    ] = 64
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128
    apart: Annotated[float, typer.Option(min=0, help="Seconds from one user to the next.")] = 0.5
    gpus: Gpus = 2
    seed: Seed = 0
    ways: Sequence[Way] = field(init=False)
    played: dict[str, Mapping[str, PlayedLoad]] = field(default_factory=dict, init=False)

    async def loads(self) -> Sequence[tuple[Way, str]]:
        """Play all phases on every way. Each phase of a way is a load."""
        phases = self.requests()
        longest = phases[0][0].input_tokens + self.output_tokens
        self.ways = await ways_of(self, self.engine, self.gpus, watched=True)
        self.measured = measured_by(self.ways)
        for way in self.ways:
            way.about.check_length(longest, f"--document-tokens {self.document_tokens}")
            loads = await way.play("shared", *phases)
            self.played[way.name] = dict(zip(PHASES, loads, strict=True))
        return [(way, phase) for way in self.ways for phase in PHASES]

    def requests(self) -> list[list[TraceRequest]]:
        """The requests of each phase. The last phase is about another document."""
        users = self.users
        workload = documents.SharedDocument(
            users=users + 1,
            document_tokens=self.document_tokens,
            question_tokens=self.question_tokens,
            output_tokens=self.output_tokens,
            seed=self.seed,
        )
        rows = list(documents.shared_document(workload))
        others = [
            replace(
                row,
                id=f"second-{row.id}",
                blocks=tuple(block + OTHER_DOCUMENT for block in row.blocks or ()),
            )
            for row in rows[:users]
        ]
        return [
            [replace(row, arrival_s=number * self.apart) for number, row in enumerate(phase)]
            for phase in (rows[:1], rows[1:users], rows[users:], others)
        ]

    async def row(self, load: tuple[Way, str]) -> Row:
        """The row of a phase. Cold counts users with a cache hit of less than half the document."""
        # Without cached tokens nobody knows who was cold.
        way, phase = load
        played = self.played[way.name][phase]
        answered = played.answered
        if any(reply.cached_tokens is None for reply in answered):
            raise InputError(
                f"--target {way.about.name}: does not report cached tokens; start vLLM with "
                "--enable-prompt-tokens-details"
            )
        # Times, and the KV cache at its fullest.
        times = ttfts(answered)
        most = max(kv_use(way, played.samples), key=lambda use: use.total, default=None)
        shared = -(-self.document_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        cold = [r for r in answered if (r.cached_tokens or 0) < self.document_tokens / 2]
        return {
            "way": way.name,
            "phase": phase,
            "users": len(played.seen),
            "cold": len(cold),
            "ttft_s": median(times),
            "ttft_max_s": max(times),
            "hit_ratio": hit_ratio(answered),
            "kv_tokens": most and most.total,
            "kv_copies": most and most.copies(shared),
            "kv_tokens_per_user": most and most.per_user(shared),
            "failed": len(played.seen) - len(answered),
            "verdict": played.verdict,
        }

    def sentence(self, rows: Sequence[Row]) -> str:
        names = list(dict.fromkeys(row["way"] for row in rows))
        name = PROXY if PROXY in names else names[-1]
        self._add_facts({row["phase"]: row for row in rows if row["way"] == name}, name)
        words = self._words(f" ({name})" if len(names) > 1 else "")
        # How often the other ways computed the document.
        for other in names:
            if other != name:
                of = [r for r in rows if r["way"] == other and r["phase"] in (FIRST, OTHERS)]
                words += f" {other[0].upper()}{other[1:]}: {sum(row['cold'] for row in of)} cold."
        self.note(
            "KV use is unknown without vLLM metrics; name the engines with --engine",
            when=self.facts["kv_tokens_per_added_user"] is None,
        )
        self.note_failed(rows, "were rejected or failed and are in no other column")
        return words

    def _add_facts(self, of: Mapping[str, Row], name: str) -> None:
        """Add the figures of the way `name`, from its rows by phase.

        KV use is flat if a user adds hardly more than the own question and answer. A copy of the
        document on another engine belongs to no user and is counted apart.
        """
        first, others, alone, all_cold = (of[phase] for phase in PHASES)
        (request,), (other, *_), *_ = self.requests()
        shared = shared_tokens(request, other)
        own = request.input_tokens + request.output_tokens - shared
        grown = others["kv_tokens_per_user"]
        self.facts |= {
            "cold": first["cold"] + others["cold"],
            "cold_of_all": all_cold["cold"],
            "ttft_cold_s": first["ttft_s"],
            "ttft_cached_s": None if alone["cold"] else alone["ttft_s"],
            "ttft_cached_beside_others_s": others["ttft_s"],
            "cold_over_cached": None if alone["cold"] else first["ttft_s"] / alone["ttft_s"],
            "hit_ratio_of_the_others": others["hit_ratio"],
            "kv_tokens_per_added_user": grown,
            "kv_document_copies": others["kv_copies"],
            "kv_document_copies_of_all": all_cold["kv_copies"],
            "kv_tokens_per_user_of_all": all_cold["kv_tokens_per_user"],
            "kv_flat": None if grown is None else grown < own + FLAT * shared,
            "document_tokens": shared,
            "own_tokens": own,
            "prompt_tokens": request.input_tokens,
            "api_server_s": self.ways[0].api_server_s(request.input_tokens),
        }

    def _words(self, way: str) -> str:
        facts, users = self.facts, self.users
        cold, faster = facts["cold"], facts["cold_over_cached"]
        if cold > users / 2:
            return (
                f"The document was not shared: {cold} of {users} users waited for its whole prefill"
                f"{way}; is prefix caching on?"
            )
        hit = "no cache hit for a single later user"
        if faster is not None:
            hit = f"a cache hit {duration(facts['ttft_cached_s'])} ({ratio(faster)} shorter)"
            if facts["api_server_s"] is not None:
                hit += f", of which the API server takes {duration(facts['api_server_s'])}"
        times = "once" if facts["cold_of_all"] == 1 else f"{facts['cold_of_all']} times"
        return (
            f"The document was computed for {cold} of {users} users{way}. TTFT is "
            f"{duration(facts['ttft_cold_s'])} cold, with {hit}. The others ask {self.apart:g} s "
            f"apart: their median is {duration(facts['ttft_cached_beside_others_s'])}, they find "
            f"{facts['hit_ratio_of_the_others']:.1%} of their tokens cached{kv_words(facts)}. "
            f"A document that no engine held was computed {times} for {users} users."
        )

    def plot(self, rows: Sequence[Row]) -> str:
        waits, used, most = [], [], 1
        for way in self.ways:
            first, others, _, cold = self.played[way.name].values()
            for name, of in (("one first", [*first.seen, *others.seen]), (ALL_COLD, cold.seen)):
                points = [(float(place), t) for place, t in enumerate(sorted(ttfts(of)), start=1)]
                waits.append(Series(f"{way.name}, {name}", points))
                most = max(most, len(of))
            peaks: dict[int, float] = {}
            for use in kv_use(way, others.samples):
                if use.running:
                    peaks[use.running] = max(peaks.get(use.running, 0.0), use.total)
            if peaks:
                used.append(Series(way.name, [(float(n), t) for n, t in sorted(peaks.items())]))
        if (api_s := self.facts["api_server_s"]) is not None:
            waits.append(Series("API server alone", (), [(1.0, api_s), (float(most), api_s)]))
        users = Axis("users, fastest first", count_label, log=False)
        panels = [Panel(waits, users, Axis("TTFT"))]
        if used:
            tokens = self.facts["prompt_tokens"]
            copies = [(float(n), float(n * tokens)) for n in range(1, most + 1)]
            used.append(Series("one copy per user", (), copies))
            x = Axis("users served at once", count_label, log=False)
            panels.append(Panel(used, x, Axis("KV tokens in use", count_label)))
        return document(*panels)


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


def shared_tokens(request: TraceRequest, other: TraceRequest) -> int:
    """Return the tokens with which both prompts begin."""
    pairs = zip(request.blocks or (), other.blocks or (), strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return min(count * request.block_tokens, request.input_tokens)


def kv_words(facts: Mapping[str, Any]) -> str:
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
