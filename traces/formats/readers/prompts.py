"""Read data sets of prompts and chats, and the inputs of load generators.

They have no times: rows are one second apart, and a replay sets its own rate.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from forebay.traces.formats.body import (
    answer_tokens,
    build,
    message_list,
    of_body,
    prompt_tokens,
    text_tokens,
)
from forebay.traces.formats.head import Head
from forebay.traces.formats.table import ReadOptions, TraceFormat
from forebay.traces.reading.reader import Order, ParseRow
from forebay.traces.rows import NotARequestError, RowError, SourceRow
from forebay.traces.schema import TraceRequest
from forebay.traces.text import messages_text

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
         "assistant": "assistant", "bing": "assistant", "bard": "assistant", "system": "system",
         "tool": "tool"}  # fmt: skip
FIXED = Order(rebase=False)


def _sharegpt(options: ReadOptions) -> ParseRow:
    """Make a request of each turn that has an answer, with the turns before it as history."""
    seconds: Iterator[int] = count()

    def parse(row: SourceRow) -> Iterator[TraceRequest]:
        turns = row.get("conversations", "conversation", "items", "messages")
        if not isinstance(turns, list):
            raise RowError("conversations: not a list of turns")
        session = row.text("id") or f"row-{row.number}"
        history: list[dict[str, Any]] = []
        parent = None
        for turn in turns:
            role, text = _turn(turn)
            if role == "assistant" and history:
                name = f"{session}-{row.number}-{len(history)}"
                yield TraceRequest(
                    id=name,
                    arrival_s=float(next(seconds)),
                    input_tokens=text_tokens(messages_text(history), options),
                    output_tokens=options.counter.count(text),
                    messages=tuple(history),
                    session=session,
                    parent=parent,
                )
                parent = name
            history.append({"role": role, "content": text})
        if parent is None:
            raise NotARequestError("conversations without an answer")

    return parse


def _turn(turn: Any) -> tuple[str, str]:
    if isinstance(turn, dict):
        role, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if role in ROLES and isinstance(text, str):
            return ROLES[role], text
    raise RowError(f"conversations: {str(turn)[:60]!r} is not a turn with from and value")


def _batch(options: ReadOptions) -> ParseRow:
    """Read the input file of the batch API. Batches are not urgent: their class is batch."""
    seconds: Iterator[int] = count()

    def parse(row: SourceRow) -> TraceRequest:
        url = row.text("url") or ""
        if not url.endswith(("/completions", "/responses", "/messages")):
            raise NotARequestError(f"rows for {url}, which generates no text")
        fields = of_body(row.object("body"), options)
        return build(
            row,
            {"stream": False, "service_class": "batch", **fields},
            options,
            name=row.text("custom_id") or f"batch-{row.number}",
            arrival_s=float(next(seconds)),
            input_tokens=None,
            output_tokens=None,
        )

    return parse


def _prompts(options: ReadOptions) -> ParseRow:
    """Read a prompt a row, with lengths if the row has them, as in vLLM's data sets."""
    seconds: Iterator[int] = count()

    def parse(row: SourceRow) -> TraceRequest:
        fields: dict[str, Any] = {}
        if row.get("messages") is not None:
            fields["messages"] = message_list(row.get("messages"))
        else:
            text = row.get("prompt", "text", "question", "instruction", "content", "input")
            if not isinstance(text, str):
                raise RowError("no prompt; name its column with --map text=COLUMN")
            fields["text"] = text
        # The answer: its text, or only its length.
        answer = row.get("output", "answer", "response", "completion")
        output = row.whole_or(
            None, "output_tokens", "output_tokens_count", "output_len", "output_length",
            "completion_tokens", "max_tokens",
        )  # fmt: skip
        return build(
            row,
            fields,
            options,
            name=f"prompt-{row.number}",
            arrival_s=float(next(seconds)),
            input_tokens=row.whole_or(
                None, "input_tokens", "prompt_tokens", "prompt_tokens_count", "prompt_len", least=1
            ),
            output_tokens=answer_tokens(answer, options, output),
        )

    return parse


def _aiperf_turns(options: ReadOptions) -> ParseRow:
    """Read aiperf's single-turn and multi-turn data sets. A turn has only its new text.

    The answers of a session are not in the file. The history has text of their length instead.
    """
    from forebay.traces.formats.readers.turns import filler

    seconds: Iterator[int] = count()

    def parse(row: SourceRow) -> Iterator[TraceRequest]:
        session = row.text("session_id")
        turns = row.get("turns") or [row.values]
        # Each turn is a request. Its prompt is the history so far.
        history: list[dict[str, Any]] = []
        parent, start_s = None, None
        for index, turn in enumerate(turns):
            # A turn without an arrival time follows the rate that was asked for.
            text = turn.get("text") or " ".join(map(str, turn.get("texts") or ()))
            if not text:
                raise RowError(f"turn {index + 1}: no text; images alone are not replayed")
            history.append({"role": turn.get("role") or "user", "content": text})
            name = f"{session or 'row'}-{row.number}-{index}"
            output = turn.get("output_length") or options.output_tokens or 128
            wait_ms = turn.get("delay") or 0
            moment = turn.get("timestamp")
            start_s = float(next(seconds)) if moment is None else moment / 1000
            yield TraceRequest(
                id=name,
                arrival_s=start_s,
                input_tokens=text_tokens(messages_text(history), options),
                output_tokens=output,
                messages=tuple(history),
                session=session,
                parent=parent,
                think_s=wait_ms / 1000 if parent else None,
                parameters=turn.get("extra"),
            )
            history.append({"role": "assistant", "content": filler(name, output)})
            parent = name

    return parse


def _payloads(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Split `{"data": [{"session_id", "payloads": [...]}]}` (in genai-perf, `payload`)."""
    for item in document.get("data") or ():
        if not isinstance(item, dict):
            raise RowError("data: not a list of objects")
        bodies = item.get("payloads", item.get("payload")) or [item]
        for index, body in enumerate(bodies if isinstance(bodies, list) else [bodies]):
            yield {"session": item.get("session_id"), "index": index, "body": body}


def _inputs(options: ReadOptions) -> ParseRow:
    seconds: Iterator[int] = count()
    numbers: Iterator[int] = count(1)
    last: dict[str, str] = {}

    def parse(row: SourceRow) -> TraceRequest:
        fields = of_body(row.object("body"), options)
        if prompt_tokens(fields, options) is None:
            raise NotARequestError("payloads without a prompt")
        session = row.text("session")
        name = f"input-{next(numbers)}"
        parent = last.get(session) if session and row.get("index") else None
        if session:
            last[session] = name
        return build(
            row,
            {**fields, "session": session, "parent": parent},
            options,
            name=name,
            arrival_s=float(next(seconds)),
            input_tokens=None,
            output_tokens=fields.get("output_tokens") or options.output_tokens or 128,
        )

    return parse


def _has_prompts(head: Head) -> bool:
    lengths = {"output_tokens", "output_tokens_count", "output_len", "prompt_tokens_count"}
    times = {"timestamp", "time", "created", "arrival_s", "startTime", "start_time", "ts"}
    return head.has("prompt") and (
        len(head.columns) == 1 or (bool(lengths & head.columns) and not times & head.columns)
    )


FORMATS = (
    TraceFormat(
        name="sharegpt",
        what="ShareGPT and other chats: a list of `conversations`",
        keeps="messages, sessions, parents",
        recognise=lambda head: head.has("conversations"),
        parser=_sharegpt,
        order=FIXED,
    ),
    TraceFormat(
        name="openai-batch",
        what="input files of OpenAI's batch API, also as `vllm run-batch` reads them",
        keeps="messages, tools, model, parameters; class batch",
        recognise=lambda head: head.has("custom_id", "url", "body"),
        parser=_batch,
        order=FIXED,
        own_ids=True,
    ),
    TraceFormat(
        name="aiperf-turns",
        what="aiperf's single-turn and multi-turn data sets",
        keeps="messages, sessions, parents, think times",
        recognise=lambda head: (
            head.has("session_id", "turns")
            or (head.has("text") and bool({"output_length", "session_id"} & head.columns))
            or head.columns in ({"text"}, {"texts"})
        ),
        parser=_aiperf_turns,
        order=FIXED,
    ),
    TraceFormat(
        name="perf-inputs",
        what="`inputs.json` of aiperf and genai-perf",
        keeps="messages, tools, model, parameters, sessions",
        recognise=lambda head: (
            head.has("data")
            and (
                "payload" in str(head.first)[:4000] or bool({"payload", "payloads"} & head.columns)
            )
        ),
        parser=_inputs,
        unpack=_payloads,
        order=FIXED,
    ),
    TraceFormat(
        name="prompts",
        what="a prompt a row: custom data sets of `vllm bench`, guidellm and inference-perf",
        keeps="text or messages",
        recognise=_has_prompts,
        parser=_prompts,
        order=FIXED,
    ),
)
