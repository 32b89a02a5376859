"""The study `hol`: how a long prompt delays a chat, and what smaller chunks cost the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import line, xy_plot
from forebay.analysis.experiments.result import FILLED, VARIED, Column, Result, Row
from forebay.analysis.experiments.studies.hol_fleet import HolFleet, HolOptions
from forebay.analysis.experiments.study import integers
from forebay.analysis.experiments.target import SIM, Ask, StudyFailed, StudyTarget
from forebay.analysis.statistics.units import duration
from forebay.traces.ground.errors import InputError

CHAT_TOKENS, CHAT_OUTPUT = 500, 20_000
UPLOAD_AT_S = 1.0
UPLOAD_OUTPUT = 16  # enough to see the chat's first tokens after the prefill
UNNOTICED_S = 0.15  # readers do not notice a shorter pause


@dataclass(kw_only=True)
class Hol(HolOptions):
    """Head-of-line blocking: the longest pause in a chat while a long prompt is
    computed.

    A sim: target is measured with every chunk size of --chunks, then a fleet of it
    with and without chunked prefill and proxy. Servers by URL keep their own chunk
    size; give --target several times to compare them.

    Example:  forebay experiment hol --target sim:phi-3-mini@h200-nvl --out runs/hol
    """

    COLUMNS = (
        Column("server", "server", "text", when=VARIED),
        Column("max_num_batched_tokens", "chunk", "count", when=FILLED),
        Column("quiet_gap_s", "quiet gap"),
        Column("worst_gap_s", "worst gap"),
        Column("gap_ratio", "worst / quiet", "ratio"),
        Column("upload_ttft_s", "upload TTFT"),
        Column("upload_ratio", "× first", "ratio"),
    )
    SEVERAL = True

    chunks: Annotated[
        str, typer.Option(help="Values of max_num_batched_tokens to try on a sim: target.")
    ] = "131072,8192,2048,1024,512,256"
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Many chats beside documents, with and without proxy.")
    ] = False
    beside: Result | None = field(default=None, init=False)

    async def measure(self) -> Result:
        if not self.fleet:
            return await super().measure()
        if len(self.targets) > 1:
            raise InputError("--fleet: give one --target, and the engines with --engine")
        return await self.of_fleet().measure()

    def of_fleet(self) -> HolFleet:
        """The study of a fleet with the same options."""
        options = {f.name: getattr(self, f.name) for f in fields(HolOptions) if f.init}
        fleet = HolFleet(**options)
        fleet.line, fleet.flags = self.line, self.flags
        return fleet

    async def loads(self) -> Sequence[tuple[str, int | None]]:
        if self.engine:
            raise InputError("--engine: only with --fleet; otherwise give each URL with --target")
        if "max_num_batched_tokens" in self.flags:
            raise InputError("--max-num-batched-tokens: give --chunks, its values to try")
        sizes = integers(self.chunks, "--chunks")[::-1]
        return [(t, s) for t in self.targets for s in (sizes if t.startswith(SIM) else [None])]

    async def row(self, load: tuple[str, int | None]) -> Row:
        target, size = load
        server = await self.open(target, **({"max_num_batched_tokens": size} if size else {}))
        measured = await beside_a_chat(server, self.prompt_tokens)
        return measured | {"max_num_batched_tokens": size}

    async def more(self, rows: Sequence[Row]) -> None:
        """Measure a fleet of a simulated engine, too."""
        if len(self.targets) > 1 or not self.target.startswith(SIM):
            return
        try:
            self.beside = await self.of_fleet().measure()
        except (InputError, StudyFailed) as error:  # the sweep is still valid
            self.notes.append(f"not measured, with and without the proxy: {error}")

    def columns(self, rows: Sequence[Row]) -> Sequence[Column]:
        columns = super().columns(rows)
        if columns[0].key == "server":  # makes room for the names
            columns = [replace(c, shown=c.key != "quiet_gap_s") for c in columns]
        return columns

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **(self.beside.settings if self.beside else {})}

    def sentence(self, rows: Sequence[Row]) -> str:
        first, others = rows[0], []
        # Ratios refer to the engine's largest chunk, or to the first server.
        for row in rows:
            base = first
            if row["max_num_batched_tokens"]:
                base = next(r for r in rows if r["server"] == row["server"])
            row["upload_ratio"] = row["upload_ttft_s"] / base["upload_ttft_s"]
            if base is first and row is not first:
                others.append(row)
        # The sentence names the first row, and the row that costs the prompt least.
        self.measured = ", ".join(dict.fromkeys(str(row["server"]) for row in rows))
        self.facts |= {"stall_s": first["worst_gap_s"], "upload_ttft_s": first["upload_ttft_s"]}
        words = (
            f"A prompt of {self.prompt_tokens:,} tokens stalls a chat for "
            f"{duration(first['worst_gap_s'])} on {_named(first)}"
        )
        if others:
            chosen = _cheapest(others)
            words += (
                f", for {duration(chosen['worst_gap_s'])} on {_named(chosen)}, at "
                f"{chosen['upload_ratio'] - 1:+.0%} TTFT for the prompt"
            )
        words += "."
        if fleet := self.beside:
            what = f"{self.gpus} engines, {self.duration:g} s"
            self.facts |= {**fleet.facts, "fleet": list(fleet.rows)}
            self.notes += [f"with and without the proxy: {what}; all figures: --fleet"]
            self.notes += fleet.notes
            words += f" {fleet.sentence}"
        return words

    def plot(self, rows: Sequence[Row]) -> str:
        simulated = all(row["max_num_batched_tokens"] for row in rows)
        placed = [
            row | {"place": row["max_num_batched_tokens"] or number}
            for number, row in enumerate(rows, start=1)
        ]
        series = [
            line("worst gap of the chat", placed, "place", "worst_gap_s"),
            line("TTFT of the upload", placed, "place", "upload_ttft_s"),
        ]
        return xy_plot(series, "max_num_batched_tokens" if simulated else "server", "time")


async def beside_a_chat(server: StudyTarget, prompt_tokens: int) -> Row:
    """Start a chat, send a prompt of `prompt_tokens` a second later, and measure both."""
    about = server.about
    about.check_length(prompt_tokens + UPLOAD_OUTPUT, f"--prompt-tokens {prompt_tokens}")
    # The chat must still decode when the upload arrives, so it answers as long as it can.
    room = CHAT_OUTPUT
    if about.context is not None:
        room = min(CHAT_OUTPUT, about.context - CHAT_TOKENS)
    asks = [
        Ask("chat", CHAT_TOKENS, room),
        Ask("upload", prompt_tokens, UPLOAD_OUTPUT, UPLOAD_AT_S),
    ]
    chat, upload = await server.run(asks, until="upload")
    _ = chat.ttft_s  # raises StudyFailed if the chat was not answered
    # Gaps before the upload are the measure for the gaps during it.
    gaps = list(pairwise(chat.events_s))
    quiet = [b - a for a, b in gaps if b <= UPLOAD_AT_S]
    beside = [b - a for a, b in gaps if b > UPLOAD_AT_S]
    if not quiet or not beside:
        raise StudyFailed(f"{about.name}: the chat had no tokens before or beside it")
    if not median(quiet):
        raise StudyFailed(
            f"{about.name}: most tokens of the chat arrived together; lower --time-scale"
        )
    return {
        "server": about.name.removeprefix("http://"),
        "salt": about.salt,
        "quiet_gap_s": median(quiet),
        "worst_gap_s": max(beside),
        "gap_ratio": max(beside) / median(quiet),
        "upload_ttft_s": upload.ttft_s,
    }


def _cheapest(rows: Sequence[Row]) -> Row:
    """The row with the shortest upload TTFT among the rows without a noticeable pause."""
    smooth = [row for row in rows if row["worst_gap_s"] <= UNNOTICED_S]
    if smooth:
        return min(smooth, key=lambda row: float(row["upload_ttft_s"]))
    return min(rows, key=lambda row: float(row["worst_gap_s"]))


def _named(row: Row) -> str:
    size = row["max_num_batched_tokens"]
    return f"chunks of {size:,}" if size else str(row["server"])
