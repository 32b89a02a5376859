"""Read traces of block ids: Mooncake, its form with sessions, and Qwen-Bailian.

Mooncake: ids are prefix-chained (an equal id means an equal prefix), and there are
ceil(input_length / 512) of them. Both hold in every row of the published files. Source:
kvcache-ai/Mooncake, FAST25-release/traces. aiperf and Dynamo define the form with sessions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay.traces.formats.body import of_body, text_tokens
from forebay.traces.formats.table import COMPLETION, ReadOptions, row_format
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.reading.jsonl import block_ids
from forebay.traces.rows import RowError, SourceRow
from forebay.traces.text import block_text, messages_text

BAILIAN_TOKENS = 16
MOST_FILLER = 10_000_000  # tokens
SURELY_MS = 100.0  # a smaller time with a fraction may be in seconds
BLOCK_SIZES = (512, 16, 64, 32, 128, 256, 1024)


@row_format(
    name="bailian",
    what="Qwen-Bailian usage traces (anonymised production traffic of Alibaba)",
    keeps="blocks of 16 tokens, sessions, parents; the type as tenant",
    recognise=lambda head: head.has("chat_id", "parent_chat_id"),
    own_ids=True,
)
def bailian(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Follow parents to the root, whose id names the session. Blocks have 16 tokens."""
    roots: dict[int, int] = row.facts.memory
    chat = row.whole("chat_id")
    above = row.get("parent_chat_id")
    parent = None if above is None or int(above) < 0 else int(above)
    root = chat if parent is None else roots.get(parent, parent)
    input_tokens = row.whole("input_length", least=1)
    request = TraceRequest(
        id=str(chat),
        arrival_s=row.seconds("timestamp"),
        input_tokens=input_tokens,
        output_tokens=row.whole("output_length"),
        **_blocks(row, input_tokens, options.block_tokens or BAILIAN_TOKENS),
        session=str(root),
        parent=str(parent) if parent in roots else None,
        tenant=row.text("type"),
    )
    roots[chat] = root
    return request


def _blocks(row: SourceRow, input_tokens: int, size: int) -> dict[str, Any]:
    """Read `hash_ids` as blocks of `size` tokens. A row without them gives only lengths."""
    ids = row.get("hash_ids")
    if ids is None or ids == []:
        row.note("rows without hash_ids, whose prompts share nothing")
        return {}
    try:
        return {
            "blocks": block_ids(row.values, "hash_ids", input_tokens, size),
            "block_tokens": size,
        }
    except RowError as error:
        if not isinstance(ids, list) or -(-input_tokens // size) == len(ids):
            raise
        fits = (other for other in BLOCK_SIZES if -(-input_tokens // other) == len(ids))
        option = f"--block-tokens {next(fits, 'N')}"
        raise RowError(f"{error}; if they have another size, add {option}") from error


def stamp_s(row: SourceRow, options: ReadOptions) -> float:
    """Read `timestamp`, which is in milliseconds unless an option says otherwise."""
    stamp = row.get("timestamp")
    fraction = type(stamp) is float and stamp < SURELY_MS and not stamp.is_integer()
    if options.time_unit is None and fraction:
        row.note("timestamps with fractions, read as milliseconds; for seconds: --time-unit s")
    return row.seconds("timestamp", unit=options.time_unit or "ms")


@dataclass(slots=True)
class _Session:
    """The last turn of a session, which the next turn continues. `delta`: turns lack history."""

    last: TraceRequest
    delta: bool | None = None


@row_format(
    name="mooncake-sessions",
    what="Mooncake rows with sessions, of aiperf and Dynamo (`--mode cumulative` or `delta`)",
    keeps="blocks, text or messages, sessions, parents, think times",
    recognise=lambda head: (
        (head.has("session_id") and head.has_any("input_length", "hash_ids", "delay"))
        or (
            head.has_any("timestamp", "delay")
            and (
                head.has("text_input")
                or head.has("input_length", "wait_for")
                or head.has("messages", "output_length")
                or head.has("payload")
            )
        )
    ),
    order=COMPLETION,
    own_ids=True,
)
def mooncake_sessions(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Make whole prompts of turns, which may have only the new part.

    A later turn has `delay` (ms after the answer) instead of `timestamp`. The answer's time is not
    in the file, so `arrival_s` takes 0 for it. In delta mode the history is the last prompt with
    its answer, whose tokens are new blocks.
    """
    sessions: dict[str, _Session] = row.facts.memory.setdefault("sessions", {})
    name = row.text("session_id")
    before = sessions.get(name) if name is not None else None
    request = _turn(row, options, name, before)
    if before is not None and _is_delta(row, options, before, request):
        request = _whole(request, before.last)
    if name is not None:
        sessions[name] = _Session(request, before.delta if before else None)
    row.facts.memory["last_s"] = max(_last_s(row), request.arrival_s)
    return request


def _last_s(row: SourceRow) -> float:
    """Return the latest arrival so far."""
    return float(row.facts.memory.get("last_s", 0.0))


def _turn(
    row: SourceRow, options: ReadOptions, session: str | None, before: _Session | None
) -> TraceRequest:
    # A turn without a time of its own arrives its think time after the turn before.
    delay = row.get("delay", "delay_ms")
    think_s = row.seconds("delay", "delay_ms", unit="ms") if delay is not None else None
    if row.get("tool_wait_ms") is not None:
        think_s = (think_s or 0.0) + row.seconds("tool_wait_ms", unit="ms")
    if row.get("timestamp") is not None:
        arrival_s = stamp_s(row, options)
    elif before is not None:
        arrival_s = before.last.arrival_s + (think_s or 0.0)
    else:
        arrival_s = _last_s(row)
    # The prompt, without its body's limit: the row has the length of the answer.
    values = _prompt(row, options)
    values.pop("output_tokens", None)
    waits = row.get("wait_for") or ()
    output = row.whole_or(None, "output_length", "max_tokens")
    return TraceRequest(
        id=row.text("request_id") or f"mooncake-{row.number}",
        arrival_s=arrival_s,
        output_tokens=output or options.output_tokens or 1,
        session=session,
        parent=before.last.id if before is not None else None,
        waits_for=tuple(map(str, waits)),
        think_s=think_s if before is not None or waits else None,
        tenant=row.text("group_id"),
        **values,
    )


def _prompt(row: SourceRow, options: ReadOptions) -> dict[str, Any]:
    """Read the prompt in one of its four forms, with its length."""
    payload = row.object("payload")
    messages, text = row.get("messages") or payload.get("messages"), row.get("text_input")
    if messages is not None:
        values = of_body(payload or row.values, options)
        counted = text_tokens(messages_text(values["messages"]), options)
        return {**values, "input_tokens": row.whole_or(counted, "input_length", least=1)}
    if text is not None:
        return {"text": text, "input_tokens": text_tokens(text, options)}
    input_tokens = row.whole("input_length", least=1)
    size = options.block_tokens or _size(row, input_tokens)
    return {"input_tokens": input_tokens, **_blocks(row, input_tokens, size)}


def _size(row: SourceRow, input_tokens: int) -> int:
    """Find the size of a block from the first row that has only one possible size."""
    ids = row.get("hash_ids")
    size: int | None = row.facts.memory.get("block_tokens")
    if size or not isinstance(ids, list):
        return size or BLOCK_TOKENS
    size = next((size for size in BLOCK_SIZES if -(-input_tokens // size) == len(ids)), None)
    if size is not None and len(ids) > 2:
        row.facts.memory["block_tokens"] = size
    return size or BLOCK_TOKENS


def _is_delta(row: SourceRow, options: ReadOptions, before: _Session, turn: TraceRequest) -> bool:
    if row.get("message_mode") is not None:
        return bool(row.get("message_mode") == "delta")
    if options.mode != "auto":
        return options.mode == "delta"
    if turn.messages is not None or turn.text is not None:
        return False  # aiperf's default: each row has the history
    if before.delta is None:
        last = before.last
        if turn.blocks and last.blocks:
            full = last.input_tokens // last.block_tokens
            before.delta = not full or turn.blocks[:full] != last.blocks[:full]
        elif turn.input_tokens < last.input_tokens:
            before.delta = True
        else:
            raise RowError(
                f"session {row.text('session_id')!r}: these lengths do not tell whether a turn "
                "holds its history; add --mode cumulative or --mode delta",
                fatal=True,
            )
    return before.delta


def _whole(turn: TraceRequest, last: TraceRequest) -> TraceRequest:
    """Put the last prompt and its answer before the new part of a prompt."""
    whole = last.input_tokens + last.output_tokens + turn.input_tokens
    if turn.messages is not None and last.messages is not None:
        stand_in = {"role": "assistant", "content": filler(last.id, last.output_tokens)}
        messages = (*last.messages, stand_in, *turn.messages)
        return replace(turn, messages=messages, input_tokens=whole)
    if last.blocks is None:
        return replace(turn, input_tokens=whole, blocks=None)
    size = last.block_tokens
    history = last.blocks[: last.input_tokens // size]
    fresh = fresh_ids(turn.id, -(-whole // size) - len(history))
    return replace(turn, input_tokens=whole, blocks=(*history, *fresh), block_tokens=size)


@row_format(
    name="mooncake",
    what="Mooncake traces (Kimi, FAST'25): conversation, synthetic, toolagent",
    keeps="blocks of 512 tokens",
    recognise=lambda head: head.has("timestamp", "input_length", "output_length"),
)
def mooncake(row: SourceRow, options: ReadOptions) -> TraceRequest:
    if "delay" in row.values and "timestamp" not in row.values:
        raise RowError("delay and no timestamp: import this file as mooncake-sessions")
    arrival_s = stamp_s(row, options)
    input_tokens = row.whole("input_length", least=1)
    return TraceRequest(
        id=f"mooncake-{row.number}",
        arrival_s=arrival_s,
        input_tokens=input_tokens,
        output_tokens=row.whole("output_length"),
        **_blocks(row, input_tokens, options.block_tokens or BLOCK_TOKENS),
    )


def fresh_ids(name: str, count: int) -> Sequence[int]:
    """Make block ids that no request but `name` has."""
    return [xxh3_64_intdigest(f"{name}:{index}".encode()) for index in range(count)]


def filler(name: str, tokens: int) -> str:
    """Make a text of `tokens` tokens for an answer that is not in the file."""
    if tokens > MOST_FILLER:
        raise RowError(f"an answer of {tokens} tokens; are columns mixed up?")
    return block_text(xxh3_64_intdigest(name.encode()), max(tokens, 1), "").decode().strip()
