"""Read data sets of prompts and chats, and the inputs of load generators.

They have no times: rows are one second apart, and a replay sets its own rate.
"""

from collections.abc import Iterable, Iterator
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
from forebay.traces.formats.readers.turns import filler, stamp_s
from forebay.traces.formats.table import ReadOptions, row_format
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.reader import Order
from forebay.traces.rows import NotARequestError, RowError, SourceRow
from forebay.traces.text import messages_text

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
         "assistant": "assistant", "bing": "assistant", "bard": "assistant", "system": "system",
         "tool": "tool", "function_call": "assistant", "observation": "tool",
         "function_response": "tool"}  # fmt: skip
TURNS = ("conversations", "conversation", "items")
FIXED = Order(rebase=False)
ANSWER_TOKENS = 128
"""Length of an answer where neither the file nor an option has it: the tools' default."""


def _has_chat(head: Head) -> bool:
    """True for a list of turns. Under a common name it must be a whole chat with its answer."""
    turns = next((head.first[key] for key in TURNS[1:] if head.first.get(key)), None)
    last = turns[-1] if isinstance(turns, list) else None
    answered = isinstance(last, dict) and ROLES.get(str(last.get("from", last.get("role"))))
    return head.has("conversations") or answered == "assistant"


@row_format(
    name="sharegpt",
    what="ShareGPT, WildChat and other chats: a list of `conversations`",
    keeps="messages, sessions, parents",
    recognise=_has_chat,
    order=FIXED,
)
def sharegpt(row: SourceRow, options: ReadOptions) -> Iterator[TraceRequest]:
    """Make a request of each turn that has an answer, with the turns before it as history."""
    turns = row.get(*TURNS, "messages")
    if not isinstance(turns, list):
        raise RowError("conversations: not a list of turns")
    session = row.text("id", "conversation_hash", "conversation_id") or f"row-{row.number}"
    if row.get("timestamp") is not None:
        row.note("conversations whose timestamp is not kept")
    history: list[dict[str, Any]] = []
    parent = None
    for role, text in [_turn(turn) for turn in turns]:
        if role == "assistant" and history:
            name = f"{session}-{row.number}-{len(history)}"
            yield TraceRequest(
                id=name,
                arrival_s=row.second(),
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


def _turn(turn: Any) -> tuple[str, str]:
    if isinstance(turn, dict):
        role, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if role in ROLES and isinstance(text, str):
            return ROLES[role], text
    raise NotARequestError("conversations with a turn that has no text or an unknown role")


@row_format(
    name="openai-batch",
    what="input files of OpenAI's batch API, also as `vllm run-batch` reads them",
    keeps="messages, tools, model, parameters; class batch",
    recognise=lambda head: head.has("custom_id", "url", "body"),
    order=FIXED,
    own_ids=True,
)
def openai_batch(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read the input file of the batch API. Batches are not urgent: their class is batch."""
    url = row.text("url") or ""
    if not url.endswith(("/completions", "/responses", "/messages")):
        raise NotARequestError(f"rows for {url}, which generates no text")
    fields = {"stream": False, "service_class": "batch", **of_body(row.object("body"), options)}
    name = row.text("custom_id") or f"batch-{row.number}"
    return build(row, fields, options, name=name, arrival_s=row.second())


@row_format(
    name="aiperf-turns",
    what="aiperf's single-turn and multi-turn data sets",
    keeps="messages, sessions, parents, think times",
    recognise=lambda head: (
        head.has("session_id", "turns")
        or (head.has("text") and head.has_any("output_length", "session_id"))
        or head.columns in ({"text"}, {"texts"})
    ),
    order=FIXED,
)
def aiperf_turns(row: SourceRow, options: ReadOptions) -> Iterator[TraceRequest]:
    """Read aiperf's single-turn and multi-turn data sets. A turn has only its new text.

    The answers of a session are not in the file. The history has text of their length instead.
    """
    session = row.text("session_id")
    turns = row.get("turns") or [row.values]
    # Each turn is a request. Its prompt is the history so far.
    history: list[dict[str, Any]] = []
    parent = None
    for index, turn in enumerate(turns):
        history.append(_new_message(turn, index + 1))
        name = f"{session or 'row'}-{row.number}-{index}"
        values = row.with_values(turn)
        output = values.whole_or(None, "output_length") or options.output_tokens or ANSWER_TOKENS
        wait_s = values.seconds("delay", unit="ms") if turn.get("delay") else 0.0
        # A turn without an arrival time follows the rate that was asked for.
        timed = turn.get("timestamp") is not None
        yield TraceRequest(
            id=name,
            arrival_s=stamp_s(values, options) if timed else row.second(),
            input_tokens=text_tokens(messages_text(history), options),
            output_tokens=output,
            messages=tuple(history),
            session=session,
            parent=parent,
            think_s=wait_s if parent else None,
            parameters=turn.get("extra"),
        )
        history.append({"role": "assistant", "content": filler(name, output)})
        parent = name


def _new_message(turn: dict[str, Any], number: int) -> dict[str, Any]:
    text = turn.get("text") or " ".join(map(str, turn.get("texts") or ()))
    if not text:
        raise RowError(f"turn {number}: no text; images alone are not replayed")
    return {"role": turn.get("role") or "user", "content": text}


def _payloads(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Split `{"data": [{"session_id", "payloads": [...]}]}` (in genai-perf, `payload`)."""
    for item in document.get("data") or ():
        if not isinstance(item, dict):
            raise RowError("data: not a list of objects")
        bodies = item.get("payloads", item.get("payload")) or [item]
        for index, body in enumerate(bodies if isinstance(bodies, list) else [bodies]):
            yield {"session": item.get("session_id"), "index": index, "body": body}


@row_format(
    name="perf-inputs",
    what="`inputs.json` of aiperf and genai-perf",
    keeps="messages, tools, model, parameters, sessions",
    recognise=lambda head: (
        head.has("data")
        and ("payload" in str(head.first)[:4000] or head.has_any("payload", "payloads"))
    ),
    unpack=_payloads,
    order=FIXED,
)
def perf_inputs(row: SourceRow, options: ReadOptions) -> TraceRequest:
    fields = of_body(row.object("body"), options)
    if prompt_tokens(fields, options) is None:
        raise NotARequestError("payloads without a prompt")
    second = row.second()
    name = f"input-{second + 1:.0f}"
    before = row.turn_before(row.text("session"), name)
    fields |= {"session": row.text("session"), "parent": before if row.get("index") else None}
    output = fields.get("output_tokens") or options.output_tokens or ANSWER_TOKENS
    return build(row, fields, options, name=name, arrival_s=second, output_tokens=output)


def _has_prompts(head: Head) -> bool:
    lengths = ("output_tokens", "output_tokens_count", "output_len", "prompt_tokens_count")
    times = ("timestamp", "time", "created", "arrival_s", "startTime", "start_time", "ts")
    return head.has("prompt") and (
        len(head.columns) == 1 or (head.has_any(*lengths) and not head.has_any(*times))
    )


@row_format(
    name="prompts",
    what="a prompt a row: custom data sets of `vllm bench`, guidellm and inference-perf",
    keeps="text or messages",
    recognise=_has_prompts,
    order=FIXED,
)
def prompts(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read a prompt a row, with lengths if the row has them, as in vLLM's data sets."""
    # The prompt: messages, or a text behind its document.
    fields: dict[str, Any] = {}
    if row.get("messages") is not None:
        fields["messages"] = message_list(row.get("messages"))
    else:
        text = row.get("prompt", "text", "question", "instruction", "content", "input")
        if not isinstance(text, str):
            raise RowError("no prompt; name its column with --map text=COLUMN")
        context = row.get("context")  # the document of a question, as in LongBench
        fields["text"] = f"{context}\n\n{text}" if isinstance(context, str) else text
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
        arrival_s=row.second(),
        input_tokens=row.whole_or(
            None, "input_tokens", "prompt_tokens", "prompt_tokens_count", "prompt_len", least=1
        ),
        output_tokens=answer_tokens(answer, options, output),
    )
