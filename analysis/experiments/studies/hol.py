"""The study `hol`: how a long prompt delays a chat, and what smaller chunks cost the prompt."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Series, xy_plot
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.studies.hol_fleet import fleet_study, requests
from forebay.analysis.experiments.study import Engines, Gpus, Seed, Study, Work, integers, study
from forebay.analysis.experiments.target import SIM, Ask, StudyFailed, StudyTarget
from forebay.analysis.statistics.units import duration
from forebay.traces.command_line.options import a_time
from forebay.traces.errors import InputError

HELP = """Head-of-line blocking: the longest pause in a chat while a long prompt is
computed.

A sim: target is measured with every chunk size of --chunks, then a fleet of it
with and without chunked prefill and proxy. Servers by URL keep their own chunk
size; give --target several times to compare them.

Example:  forebay experiment hol --target sim:phi-3-mini@h200-nvl --out runs/hol
"""
CHUNKS = "131072,8192,2048,1024,512,256"
CHAT_TOKENS, CHAT_OUTPUT = 500, 20_000
UPLOAD_AT_S = 1.0
UPLOAD_OUTPUT = 16  # enough to see the chat's first tokens after the prefill
UNNOTICED_S = 0.15  # readers do not notice a shorter pause
COLUMNS = (
    Column("server", "server", "text"),
    Column("max_num_batched_tokens", "chunk", "count"),
    Column("quiet_gap_s", "quiet gap"),
    Column("worst_gap_s", "worst gap"),
    Column("gap_ratio", "worst / quiet", "ratio"),
    Column("upload_ttft_s", "upload TTFT"),
    Column("upload_ratio", "× first", "ratio"),
)


@study("hol", several=True)
def command(
    options: Study,
    chunks: Annotated[
        str, typer.Option(help="Values of max_num_batched_tokens to try on a sim: target.")
    ] = CHUNKS,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens of the long prompt.")
    ] = 120_000,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Many chats beside documents, with and without proxy.")
    ] = False,
    engine: Engines = None,
    gpus: Gpus = 2,
    duration: Annotated[
        float, a_time("Time of arrivals at the fleet.", "--duration", least_s=1)
    ] = 300.0,
    chat_rate: Annotated[float, typer.Option(help="Chats per second at the fleet.")] = 4.0,
    document_rate: Annotated[
        float, typer.Option(help="Document questions per second at the fleet.")
    ] = 0.2,
    seed: Seed = 0,
) -> None:
    def of_fleet() -> Work:
        trace = requests(prompt_tokens, chat_rate, document_rate, duration, seed)
        settings = options.settings(seed=seed)
        return fleet_study(options, engine, gpus, trace, prompt_tokens, settings)

    if fleet:
        if len(options.targets) > 1:
            raise InputError("--fleet: give one --target, and the engines with --engine")
        options.finish(of_fleet())
        return
    if engine:
        raise InputError("--engine: only with --fleet; otherwise give each URL with --target")
    sizes = integers(chunks, "--chunks")[::-1]
    tries = [(t, s) for t in options.targets for s in (sizes if t.startswith(SIM) else [None])]

    async def work() -> Result:
        rows = []
        for text, size in tries:
            async with options.open(text, size) as server:
                row = await beside_a_chat(server, prompt_tokens)
                rows.append(row | {"max_num_batched_tokens": size})
        sweep = result(rows, prompt_tokens, options.settings())
        if len(options.targets) > 1 or not options.targets[0].startswith(SIM):
            return sweep
        try:
            beside = await of_fleet()
        except (InputError, StudyFailed) as error:  # the sweep is still valid
            return replace(sweep, notes=[f"not measured, with and without the proxy: {error}"])
        return with_fleet(sweep, beside, f"{gpus} engines, {duration:g} s")

    options.finish(work())


def with_fleet(sweep: Result, fleet: Result, what: str) -> Result:
    """The sweep of one engine, with the sentence and facts of the fleet added."""
    return replace(
        sweep,
        sentence=f"{sweep.sentence} {fleet.sentence}",
        facts={**sweep.facts, **fleet.facts, "fleet": list(fleet.rows)},
        notes=[f"with and without the proxy: {what}; all figures: --fleet", *fleet.notes],
        settings={**sweep.settings, **fleet.settings},
    )


async def beside_a_chat(server: StudyTarget, prompt_tokens: int) -> dict[str, Any]:
    """Start a chat, send a prompt of `prompt_tokens` a second later, and measure both."""
    context = server.about.context
    if context is not None and prompt_tokens + UPLOAD_OUTPUT > context:
        raise InputError(
            f"--prompt-tokens {prompt_tokens}: {server.about.name} takes at most {context} tokens"
        )
    # The chat must still decode when the upload arrives, so it answers as long as it can.
    room = CHAT_OUTPUT if context is None else min(CHAT_OUTPUT, context - CHAT_TOKENS)
    chat, upload = await server.run(
        [
            Ask("chat", CHAT_TOKENS, room),
            Ask("upload", prompt_tokens, UPLOAD_OUTPUT, UPLOAD_AT_S),
        ],
        until="upload",
    )
    sent_s = UPLOAD_AT_S
    _ = chat.ttft_s  # raises StudyFailed if the chat was not answered
    # Gaps before the upload are the measure for the gaps during it.
    gaps = list(pairwise(chat.events_s))
    quiet = [b - a for a, b in gaps if b <= sent_s]
    beside = [b - a for a, b in gaps if b > sent_s]
    if not quiet or not beside:
        raise StudyFailed(f"{server.about.name}: the chat had no tokens before or beside it")
    if not median(quiet):
        raise StudyFailed(
            f"{server.about.name}: most tokens of the chat arrived together; lower --time-scale"
        )
    return {
        "server": server.about.name.removeprefix("http://"),
        "salt": server.about.salt,
        "quiet_gap_s": median(quiet),
        "worst_gap_s": max(beside),
        "gap_ratio": max(beside) / median(quiet),
        "upload_ttft_s": upload.ttft_s,
    }


def result(rows: list[dict[str, Any]], prompt_tokens: int, settings: dict[str, Any]) -> Result:
    """Summarise all rows, each against its engine's largest chunk or the first server."""
    first = rows[0]
    for row in rows:
        row["upload_ratio"] = row["upload_ttft_s"] / _base(row, rows)["upload_ttft_s"]
    others = [row for row in rows[1:] if _base(row, rows) is first]
    words = (
        f"A prompt of {prompt_tokens:,} tokens stalls a chat for {duration(first['worst_gap_s'])} "
        f"on {_named(first)}"
    )
    if others:
        chosen = _cheapest(others)
        words += (
            f", for {duration(chosen['worst_gap_s'])} on {_named(chosen)}, at "
            f"{chosen['upload_ratio'] - 1:+.0%} TTFT for the prompt"
        )
    facts = {"stall_s": first["worst_gap_s"], "upload_ttft_s": first["upload_ttft_s"]}
    target = ", ".join(dict.fromkeys(str(row["server"]) for row in rows))
    columns, plot = _columns(rows), _plot(rows)
    return Result("hol", target, words + ".", columns, rows, facts, plot, (), settings)


def _columns(rows: list[dict[str, Any]]) -> list[Column]:
    several = len({row["server"] for row in rows}) > 1
    columns = [c for c in COLUMNS if c.kind != "text" or several]
    if several:  # makes room for the names
        columns = [replace(c, shown=c.key != "quiet_gap_s") for c in columns]
    if not any(row["max_num_batched_tokens"] for row in rows):
        columns = [c for c in columns if c.key != "max_num_batched_tokens"]
    return columns


def _base(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row to compare with: the same engine's largest chunk, or the first URL."""
    if not row["max_num_batched_tokens"]:
        return rows[0]
    return next(candidate for candidate in rows if candidate["server"] == row["server"])


def _cheapest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with the shortest upload TTFT among the rows without a noticeable pause."""
    smooth = [row for row in rows if row["worst_gap_s"] <= UNNOTICED_S]
    if smooth:
        return min(smooth, key=lambda row: float(row["upload_ttft_s"]))
    return min(rows, key=lambda row: float(row["worst_gap_s"]))


def _named(row: dict[str, Any]) -> str:
    size = row["max_num_batched_tokens"]
    return f"chunks of {size:,}" if size else str(row["server"])


def _plot(rows: Sequence[dict[str, Any]]) -> str:
    sized = [row["max_num_batched_tokens"] or i + 1 for i, row in enumerate(rows)]
    simulated = all(row["max_num_batched_tokens"] for row in rows)
    keys = (("worst gap of the chat", "worst_gap_s"), ("TTFT of the upload", "upload_ttft_s"))
    series = [
        Series(name, points := [(x, row[key]) for x, row in zip(sized, rows, strict=True)], points)
        for name, key in keys
    ]
    return xy_plot(series, "max_num_batched_tokens" if simulated else "server", "time")
