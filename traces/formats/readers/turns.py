"""Read traces of block ids: Mooncake, its form with sessions, and Qwen-Bailian.

Mooncake: ids are prefix-chained (an equal id means an equal prefix), and there are
ceil(input_length / 512) of them. Both hold in every row of the published files. Source:
kvcache-ai/Mooncake, FAST25-release/traces. aiperf and Dynamo define the form with sessions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay.traces.formats.body import of_body, text_tokens
from forebay.traces.formats.head import Head
from forebay.traces.formats.table import COMPLETION, ReadOptions, TraceFormat
from forebay.traces.reading.jsonl import block_ids
from forebay.traces.reading.reader import Order, ParseRow
from forebay.traces.rows import RowError, SourceRow
from forebay.traces.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.text import block_text, messages_text

BAILIAN_TOKENS = 16
MOST_FILLER = 10_000_000  # tokens
BLOCK_SIZES = (512, 16, 64, 32, 128, 256, 1024)


def _mooncake(options: ReadOptions) -> ParseRow:
    def parse(row: SourceRow) -> TraceRequest:
        if "delay" in row.values and "timestamp" not in row.values:
            raise RowError("delay and no timestamp: import this file as mooncake-sessions")
        arrival_s = row.seconds("timestamp", unit="ms")
        input_tokens = row.whole("input_length", least=1)
        return TraceRequest(
            id=f"mooncake-{row.number}",
            arrival_s=arrival_s,
            input_tokens=input_tokens,
            output_tokens=row.whole("output_length"),
            **_blocks(row, input_tokens, options.block_tokens or BLOCK_TOKENS),
        )

    return parse


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


@dataclass(slots=True)
class _SessionState:
    """The last turn of a session, which the next turn continues."""

    last: TraceRequest
    delta: bool | None = None


class _MooncakeSessions:
    """Makes whole prompts of turns, which may have only the new part.

    A later turn has `delay` (ms after the answer) instead of `timestamp`. The answer's time is not
    in the file, so `arrival_s` takes 0 for it. In delta mode the history is the last prompt with
    its answer, whose tokens are new blocks.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._sessions: dict[str, _SessionState] = {}
        self._block_tokens = 0
        self._last_s = 0.0

    def parse(self, row: SourceRow) -> TraceRequest:
        session = row.text("session_id")
        before = self._sessions.get(session) if session is not None else None
        request = self._request(row, session, before)
        if before is not None and self._is_delta(row, before, request):
            request = self._whole(request, before.last)
        if session is not None:
            self._sessions[session] = _SessionState(request, before.delta if before else None)
        self._last_s = max(self._last_s, request.arrival_s)
        return request

    def _request(
        self, row: SourceRow, session: str | None, before: "_SessionState | None"
    ) -> TraceRequest:
        # A turn without a time of its own arrives its think time after the turn before.
        delay = row.get("delay", "delay_ms")
        think_s = row.seconds("delay", "delay_ms", unit="ms") if delay is not None else None
        if row.get("tool_wait_ms") is not None:
            think_s = (think_s or 0.0) + row.seconds("tool_wait_ms", unit="ms")
        if row.get("timestamp") is not None:
            arrival_s = row.seconds("timestamp", unit="ms")
        elif before is not None:
            arrival_s = before.last.arrival_s + (think_s or 0.0)
        else:
            arrival_s = self._last_s
        # The prompt, without its body's limit: the row has the length of the answer.
        values = self._prompt(row)
        values.pop("output_tokens", None)
        waits = row.get("wait_for") or ()
        return TraceRequest(
            id=row.text("request_id") or f"mooncake-{row.number}",
            arrival_s=arrival_s,
            output_tokens=row.whole_or(None, "output_length", "max_tokens")
            or self._options.output_tokens
            or 1,
            session=session,
            parent=before.last.id if before is not None else None,
            waits_for=tuple(map(str, waits)),
            think_s=think_s if before is not None or waits else None,
            tenant=row.text("group_id"),
            **values,
        )

    def _prompt(self, row: SourceRow) -> dict[str, Any]:
        """Read the prompt in one of its four forms, with its length."""
        payload = row.object("payload")
        messages, text = row.get("messages") or payload.get("messages"), row.text("text_input")
        if messages is not None:
            values = of_body(payload or row.values, self._options)
            counted = text_tokens(messages_text(values["messages"]), self._options)
            return {**values, "input_tokens": row.whole_or(counted, "input_length", least=1)}
        if text is not None:
            return {"text": text, "input_tokens": text_tokens(text, self._options)}
        input_tokens = row.whole("input_length", least=1)
        size = self._options.block_tokens or self._size(row.get("hash_ids"), input_tokens)
        return {"input_tokens": input_tokens, **_blocks(row, input_tokens, size)}

    def _size(self, ids: Any, input_tokens: int) -> int:
        """Find the size of a block from the first row that has only one possible size."""
        if not self._block_tokens and isinstance(ids, list):
            for size in BLOCK_SIZES:
                if -(-input_tokens // size) == len(ids):
                    if len(ids) > 2:
                        self._block_tokens = size
                    return size
        return self._block_tokens or BLOCK_TOKENS

    def _is_delta(self, row: SourceRow, before: _SessionState, turn: TraceRequest) -> bool:
        if row.get("message_mode") is not None:
            return bool(row.get("message_mode") == "delta")
        if self._options.mode != "auto":
            return self._options.mode == "delta"
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

    def _whole(self, turn: TraceRequest, last: TraceRequest) -> TraceRequest:
        from dataclasses import replace

        answer = last.output_tokens
        if turn.messages is not None and last.messages is not None:
            stand_in = {"role": "assistant", "content": filler(last.id, answer)}
            return replace(
                turn,
                messages=(*last.messages, stand_in, *turn.messages),
                input_tokens=last.input_tokens + answer + turn.input_tokens,
            )
        whole = last.input_tokens + answer + turn.input_tokens
        size = last.block_tokens
        history = (last.blocks or ())[: last.input_tokens // size]
        if last.blocks is None:
            return replace(turn, input_tokens=whole, blocks=None)
        fresh = fresh_ids(turn.id, -(-whole // size) - len(history))
        return replace(turn, input_tokens=whole, blocks=(*history, *fresh), block_tokens=size)


def fresh_ids(name: str, count: int) -> Sequence[int]:
    """Make block ids that no request but `name` has."""
    return [xxh3_64_intdigest(f"{name}:{index}".encode()) for index in range(count)]


def filler(name: str, tokens: int) -> str:
    """Make a text of `tokens` tokens for an answer that is not in the file."""
    if tokens > MOST_FILLER:
        raise RowError(f"an answer of {tokens} tokens; are columns mixed up?")
    return block_text(xxh3_64_intdigest(name.encode()), max(tokens, 1), "").decode().strip()


def _bailian(options: ReadOptions) -> ParseRow:
    """Follow parents to the root, whose id names the session. Blocks have 16 tokens."""
    roots: dict[int, int] = {}

    def parse(row: SourceRow) -> TraceRequest:
        chat = row.whole("chat_id")
        above = row.get("parent_chat_id")
        parent = None if above is None or int(above) < 0 else int(above)
        root = chat if parent is None else roots.get(parent, parent)
        input_tokens = row.whole("input_length", least=1)
        kind = row.text("type")
        request = TraceRequest(
            id=str(chat),
            arrival_s=row.seconds("timestamp"),
            input_tokens=input_tokens,
            output_tokens=row.whole("output_length"),
            **_blocks(row, input_tokens, options.block_tokens or BAILIAN_TOKENS),
            session=str(root),
            parent=str(parent) if parent in roots else None,
            tenant=kind,
        )
        roots[chat] = root
        return request

    return parse


def _has_sessions(head: Head) -> bool:
    return (
        head.has("session_id") and bool({"input_length", "hash_ids", "delay"} & head.columns)
    ) or (bool({"timestamp", "delay"} & head.columns) and (
        head.has("text_input") or head.has("input_length", "wait_for")
        or head.has("messages", "output_length") or head.has("payload")
    ))  # fmt: skip


FORMATS = (
    TraceFormat(
        name="bailian",
        what="Qwen-Bailian usage traces (anonymised production traffic of Alibaba)",
        keeps="blocks of 16 tokens, sessions, parents; the type as tenant",
        recognise=lambda head: head.has("chat_id", "parent_chat_id"),
        parser=_bailian,
        own_ids=True,
    ),
    TraceFormat(
        name="mooncake-sessions",
        what="Mooncake rows with sessions, of aiperf and Dynamo (`--mode cumulative` or `delta`)",
        keeps="blocks, text or messages, sessions, parents, think times",
        recognise=_has_sessions,
        parser=lambda options: _MooncakeSessions(options).parse,
        order=COMPLETION,
        own_ids=True,
    ),
    TraceFormat(
        name="mooncake",
        what="Mooncake traces (Kimi, FAST'25): conversation, synthetic, toolagent",
        keeps="blocks of 512 tokens",
        recognise=lambda head: head.has("timestamp", "input_length", "output_length"),
        parser=_mooncake,
        order=Order(rebase=True),
    ),
)
