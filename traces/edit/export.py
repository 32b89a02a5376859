"""Write a trace in the formats of other tools.

| format | rows | lost |
| --- | --- | --- |
| mooncake | timestamp in ms, lengths, block ids of 512 tokens | text, sessions, models |
| aiperf | Mooncake's rows with sessions, delays, text or messages | tenants, classes, documents |
| guidellm | prompt and token counts, a JSON line each | times, sessions, tenants, models |
| csv | id, arrival, lengths and names | prompts, block ids, think times |
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import orjson

from forebay.traces.edit.edit import text_blocks
from forebay.traces.formats.readers.turns import fresh_ids
from forebay.traces.formats.table import CSV_COLUMNS
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.text import prompt_text, shared_text


def mooncake(requests: Iterable[TraceRequest]) -> Iterator[bytes]:
    """Write the published form. A prompt without blocks gets ids of its own."""
    for request in requests:
        yield _line(_lengths(request, _milliseconds(request.arrival_s)))


def aiperf(requests: Iterable[TraceRequest]) -> Iterator[bytes]:
    """Write the form with sessions. A turn with a think time has `delay` instead of a time."""
    for request in requests:
        row: dict[str, Any] = {"timestamp": _milliseconds(request.arrival_s)}
        if request.parent is not None and request.think_s is not None:
            row = {"delay": _milliseconds(request.think_s)}
        if request.session is not None:
            row["session_id"] = request.session
        if request.messages is not None:
            row |= {"messages": request.messages, "output_length": max(1, request.output_tokens)}
            if request.tools is not None:
                row["tools"] = request.tools
        elif request.text is not None:
            row |= {"text_input": request.text, "output_length": max(1, request.output_tokens)}
        else:
            row |= {k: v for k, v in _lengths(request, 0).items() if k != "timestamp"}
        if request.parameters:
            row["extra"] = request.parameters
        yield _line(row)


def guidellm(requests: Iterable[TraceRequest]) -> Iterator[bytes]:
    """Write prompts. Block ids become the text that `forebay replay` would send."""
    for request in requests:
        yield _line(
            {
                "prompt": prompt_text(request, ""),
                "prompt_tokens_count": request.input_tokens,
                "output_tokens_count": max(1, request.output_tokens),
            }
        )


def flat(requests: Iterable[TraceRequest]) -> Iterator[bytes]:
    """Write CSV with one header."""
    yield (",".join(CSV_COLUMNS) + "\n").encode()
    for request in requests:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(
            getattr(request, column) for column in CSV_COLUMNS
        )
        yield line.getvalue().encode()


EXPORTS: Final[dict[str, Callable[[Iterable[TraceRequest]], Iterator[bytes]]]] = {
    "mooncake": mooncake,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "csv": flat,
}


def export(name: str) -> Callable[[Iterable[TraceRequest]], Iterator[bytes]]:
    """Return the writer called `name` (InputError: unknown, with the list of names)."""
    if name not in EXPORTS:
        raise InputError(f"no export format {name!r}; one of: {', '.join(EXPORTS)}")
    return EXPORTS[name]


def _lengths(request: TraceRequest, timestamp: float) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": mooncake_blocks(request),
    }


def mooncake_blocks(request: TraceRequest) -> list[int]:
    """Return ids of 512-token blocks. Smaller blocks are joined, which keeps their sharing.

    Raises:
        InputError: the trace's blocks do not divide 512 tokens.
    """
    text = shared_text(request)
    if text is not None:
        return list(text_blocks(text, request.input_tokens))
    if request.blocks is None:
        return list(fresh_ids(request.id, -(-request.input_tokens // BLOCK_TOKENS)))
    if BLOCK_TOKENS % request.block_tokens:
        raise InputError(
            f"request {request.id!r}: blocks of {request.block_tokens} tokens do not make blocks "
            f"of {BLOCK_TOKENS}; export csv or guidellm"
        )
    step = BLOCK_TOKENS // request.block_tokens
    last = len(request.blocks) - 1  # ids are chained: the last id of a run stands for the run
    return [request.blocks[min(at + step - 1, last)] for at in range(0, last + 1, step)]


def _milliseconds(seconds: float) -> float:
    value = round(seconds * 1000, 3)
    return int(value) if value.is_integer() else value


def _line(row: dict[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
