"""`hol --fleet`: chats next to long documents, with and without the proxy and chunked prefill."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Axis, Panel, Series, document, share_label
from forebay.analysis.experiments.http_system import check_no_engines, ways_of
from forebay.analysis.experiments.load_stats import percentile, ttfts
from forebay.analysis.experiments.result import VARIED, Column, Row
from forebay.analysis.experiments.study import Engines, Gpus, Seed, Study
from forebay.analysis.experiments.systems import IN_TURN, PROXY, PlayedLoad, Way, sim_ways
from forebay.analysis.experiments.target import SIM, StudyFailed
from forebay.analysis.statistics.units import duration
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.scenario import Scenario
from forebay.traces.ground.command_line.options import a_time
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.lengths import Fixed

WHOLE, CHUNKED, THEIRS = "whole", "chunked", "as the servers are"
FLAG, CLASS = "the flag", "the scheduler class"
REMEDIES: Mapping[str, Mapping[str, Any]] = {
    FLAG: {"long_prefill_token_threshold": 2048},
    CLASS: {"scheduler_cls": "forebay"},
}
"""Settings of vLLM that shorten a step with a long prompt, which no proxy can."""
ALIKE = 0.1  # a smaller relative difference of stalls is called "does not change"
REJECTED_SHARE = 0.01  # above this share, the sentence also states how many were rejected
STALL_S = 0.5  # a gap between two tokens that a reader notices as a pause
CURVE_POINTS = 100


@dataclass(kw_only=True)
class HolOptions(Study):
    """The options of `hol` and `hol --fleet`."""

    NAME = "hol"

    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of the long prompt.")] = (
        120_000
    )
    engine: Engines = None
    gpus: Gpus = 2
    duration: Annotated[
        float, a_time("Time of arrivals at the fleet.", "--duration", least_s=1)
    ] = 300.0
    chat_rate: Annotated[float, typer.Option(help="Chats per second at the fleet.")] = 4.0
    document_rate: Annotated[
        float, typer.Option(help="Document questions per second at the fleet.")
    ] = 0.2
    seed: Seed = 0


@dataclass(kw_only=True)
class HolFleet(HolOptions):
    """`hol --fleet`: the same trace on every way, each a load."""

    COLUMNS = (
        Column("way", "way", "text"),
        Column("prefill", "prefill", "text", when=VARIED),
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
    SETTINGS = ("seed",)
    LOAD_KEYS = ("way", "prefill")

    trace: Sequence[TraceRequest] = field(default=(), init=False)
    played: dict[str, PlayedLoad] = field(default_factory=dict, init=False)

    async def loads(self) -> Sequence[tuple[str, Way]]:
        self.trace = self.requests()
        return await self._ways()

    def requests(self) -> list[TraceRequest]:
        """Chats with Azure's lengths, and documents with five questions each."""
        spec = ChatBesideDocuments(
            chat_rate_per_s=self.chat_rate,
            document_rate_per_s=self.document_rate,
            document_tokens=Fixed(self.prompt_tokens),
            duration_s=self.duration,
            seed=self.seed,
        )
        rows = list(chat_beside_documents(spec))
        if not any(row.document for row in rows) or all(row.document for row in rows):
            raise InputError(
                f"--duration {self.duration:g}: no chat or no document arrives; raise it"
            )
        return [replace(row, arrival_s=row.arrival_s - rows[0].arrival_s) for row in rows]

    async def _ways(self) -> Sequence[tuple[str, Way]]:
        if not self.target.startswith(SIM):
            if not self.engine:
                raise InputError(
                    "--fleet: give the URL of each engine behind the proxy with --engine"
                )
            return [(THEIRS, way) for way in await ways_of(self, self.engine, self.gpus)]
        check_no_engines(self.engine)
        chunked = self.engine_config()
        configs = {WHOLE: whole_prompts(chunked), CHUNKED: chunked}
        configs |= {name: self.engine_config(**flags) for name, flags in REMEDIES.items()}
        return [
            (prefill, way)
            for prefill, config in configs.items()
            for way in sim_ways(self.target, Scenario(config, self.gpus))
        ]

    async def row(self, load: tuple[str, Way]) -> Row:
        """Play the trace. Raises InputError if a request does not fit."""
        prefill, way = load
        longest = max(row.input_tokens + row.output_tokens for row in self.trace)
        way.about.check_length(longest, f"--prompt-tokens {self.prompt_tokens}")
        (played,) = await way.play(f"hol-{prefill}", self.trace)
        self.played[f"{way.name}, {prefill}" if prefill != THEIRS else way.name] = played
        return {"way": way.name, "prefill": prefill, **fleet_figures(way.name, played)}

    def sentence(self, rows: Sequence[Row]) -> str:
        self.note(
            f"stalled: chats with a gap of more than {STALL_S:g} s between two tokens; chat p99 "
            "and document (median): TTFT; about five questions per document"
        )
        self.note(
            f"{FLAG}: --long-prefill-token-threshold 2048; {CLASS}: vllm serve --scheduler-cls "
            "with Forebay's",
            when=any(row["prefill"] in REMEDIES for row in rows),
        )
        few = any(row["ttft_p99_s"] is None for row in rows)
        self.note("–: a p99 needs 1,000 answered chats; raise --duration or --chat-rate", when=few)
        self.note(
            "stalls and TTFT are of answered chats only; rejected ones do not count",
            when=any(_rejects(row) for row in rows),
        )
        self.note_failed(rows, "failed and are in no other column")
        self.facts |= {
            f"worst_stall_s.{row['way']}.{row['prefill']}".replace(" ", "_"): row["stall_s"]
            for row in rows
        }
        words = [f"Beside documents of {self.prompt_tokens:,} tokens"]
        of = {(row["prefill"], row["way"]): row for row in rows}
        # Chunked prefill comes first, as vLLM does it.
        for prefill, begin in (
            (THEIRS, ""), (CHUNKED, "with chunked prefill "), (WHOLE, "With whole prefill ")
        ):  # fmt: skip
            if (prefill, PROXY) in of:
                words.append(begin + _compared(of[prefill, IN_TURN], of[prefill, PROXY]))
        # The longest stall belongs to the engine's step, so its remedies are the engine's.
        stalls = [
            f"{duration(of[remedy, PROXY]['stall_s'])} with {remedy}"
            for remedy in REMEDIES
            if (remedy, PROXY) in of
        ]
        if stalls:
            words.append(f"Behind the proxy the worst stall is {' and '.join(stalls)}.")
        return " ".join(words)

    def plot(self, rows: Sequence[Row]) -> str:
        """Plot the share of chats whose worst stall, or TTFT, is at least a given time."""
        panels: list[Panel] = []
        for title, key in (
            ("worst gap between two tokens", "stall_s"),
            ("TTFT", "ttft_response_s"),
        ):
            series = []
            for name, load in self.played.items():
                chats = [reply for reply in load.answered if not reply.document]
                values = sorted(v for reply in chats if (v := getattr(reply, key) or 0.0) > 0)
                series.append(Series(name, (), _tail(values)))
            x, y = Axis(f"{title} of a chat"), Axis("share of chats at least as long", share_label)
            panels.append(Panel(series, x, y, keyed=not panels))
        return document(*panels)


def whole_prompts(config: EngineConfig) -> EngineConfig:
    """The same engine without chunked prefill: one step must take a whole context."""
    return replace(config, enable_chunked_prefill=False, max_num_batched_tokens=config.context)


def fleet_figures(way: str, load: PlayedLoad) -> Row:
    """The figures of one way. Raises StudyFailed if no chat or no document was answered."""
    chats = [reply for reply in load.seen if reply.document is None]
    documents = [reply for reply in load.seen if reply.document is not None]
    stalls = [
        reply.stall_s for reply in chats if reply.outcome == "ok" and reply.stall_s is not None
    ]
    waits = ttfts(documents)
    if not stalls or not waits:
        raise StudyFailed(f"{way}: no chat or no document was answered")
    return {
        "stall_s": max(stalls),
        "stalled_share": sum(stall > STALL_S for stall in stalls) / len(stalls),
        "stall_p99_s": percentile(stalls, 99),
        "ttft_p50_s": percentile(ttfts(chats), 50),
        "ttft_p99_s": percentile(ttfts(chats), 99),
        "document_ttft_s": median(waits),
        "rejected": load.count("rejected"),
        "chats": len(chats),
        "documents": len(documents),
        "failed": load.count("failed"),
        "verdict": load.verdict,
    }


def _compared(direct: Row, proxy: Row) -> str:
    less = 1 - proxy["stall_s"] / direct["stall_s"] if direct["stall_s"] > 0 else 0.0
    verb = "shortens" if less > ALIKE else "lengthens" if less < -ALIKE else "does not change"
    words = (
        f"the proxy {verb} a chat's worst stall ({duration(proxy['stall_s'])} instead of "
        f"{duration(direct['stall_s'])}). Of the chats {proxy['stalled_share']:.1%} stall instead "
        f"of {direct['stalled_share']:.1%}"
    )
    if proxy["ttft_p99_s"] is not None and direct["ttft_p99_s"] is not None:
        words += (
            f", and their p99 TTFT is {duration(proxy['ttft_p99_s'])} instead of "
            f"{duration(direct['ttft_p99_s'])}"
        )
    if _rejects(proxy) or _rejects(direct):
        words += (
            f". This counts answered chats only: the proxy rejects {_rejected_share(proxy):.0%} of "
            f"all requests, {IN_TURN} {_rejected_share(direct):.0%}"
        )
    return f"{words}."


def _rejected_share(row: Row) -> float:
    return float(row["rejected"] / (row["chats"] + row["documents"]))


def _rejects(row: Row) -> bool:
    return _rejected_share(row) > REJECTED_SHARE


def _tail(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of values at or above it), thinned to the points that a plot needs."""
    count = len(values)
    thinned = {
        round(count * (1 - (1 / count) ** (i / CURVE_POINTS))) for i in range(CURVE_POINTS + 1)
    }
    places = sorted(thinned | {0, count - 1})
    return [(values[i], (count - i) / count) for i in places if i < count]
