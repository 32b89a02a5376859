"""Read the agentic data set of MLPerf Endpoints: flat JSONL, a row for each message of a chat.

Rows of a conversation stand together, in order of `turn`. A `user` or `tool` row is a request,
whose prompt is all messages so far. The `assistant` row after it is its answer, and `delay_seconds`
the time that the user or the tool took. The file has no times: requests are one second apart, and
a replay sets its own rate. Source: mlcommons/endpoints, examples/10_Agentic_Inference.

Lengths are counted from the text. An answer includes its reasoning and its calls of tools. A prompt
is its messages alone, as with other formats: a server adds the tools.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from forebay.traces.formats.body import of_body, text_tokens
from forebay.traces.formats.table import ReadOptions, row_format
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.containers import table_rows
from forebay.traces.reading.reader import Order, SeenIds
from forebay.traces.rows import FileFacts, RowError, SourceRow
from forebay.traces.text import messages_text

CLIENT_ROLES = ("user", "tool")
KEPT = ("role", "content", "name", "tool_calls", "reasoning_content")
LIMITS = ("max_new_tokens", "max_completion_tokens", "max_tokens")
MOST_ROWS = 10_000
"""Rows of one conversation, which is held in memory."""
UNKNOWN_OUTPUT_TOKENS = 128  # the default of MLPerf's client


def conversations(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    """Join the rows of each conversation to one row with the column `rows`."""
    held: list[SourceRow] = []
    seen = SeenIds()
    for number, row in table_rows(file, facts):
        if isinstance(row, RowError):
            yield number, row
            continue
        if row.get("_type") == "dataset_metadata":
            continue
        name = row.text("conversation_id")
        if held and name != held[0].text("conversation_id"):
            yield _joined(held, facts)
            held = []
        if name is None:
            yield number, RowError("conversation_id: no such column in this row, or nothing in it")
        elif not held and not seen.add(name):
            why = f"rows of conversation {name[:60]!r} are not together; sort the file by it"
            yield number, RowError(why, fatal=True)
        elif len(held) == MOST_ROWS:
            why = f"conversation {name[:60]!r} has more than {MOST_ROWS:,} rows; are they one?"
            yield number, RowError(why, fatal=True)
        else:
            held.append(row)
    if held:
        yield _joined(held, facts)


def _joined(rows: list[SourceRow], facts: FileFacts) -> tuple[int, SourceRow]:
    return rows[0].number, SourceRow(rows[0].number, {"rows": rows}, facts)


@dataclass(slots=True)
class _Conversation:
    """The messages so far, with their tokens, and the request whose answer comes next."""

    name: str
    options: ReadOptions
    shared: dict[str, Any]
    limit: int | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    input_tokens: int = 0
    last_turn: int = 0
    parent: str | None = None
    waiting: dict[str, Any] | None = None

    def read(self, row: SourceRow) -> TraceRequest | None:
        """Add a row, and return the request that it ends. Its `arrival_s` is 0."""
        turn, role = row.whole("turn", least=1), row.text("role")
        if turn <= self.last_turn:
            raise RowError(f"turn {turn} stands after turn {self.last_turn}")
        self.last_turn = turn
        if role == "assistant":
            message = _message(row)
            ended = self.end(_answer_tokens(message, self.options))
            self.add(message)
            return ended
        if role not in CLIENT_ROLES:
            raise RowError(f"role {role!r} is not user, assistant or tool")
        ended = self.end(None)
        for message in _client_messages(row):
            self.add(message)
        self._ask(row, f"{self.name}-{turn}")
        return ended

    def add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.input_tokens += text_tokens(messages_text((message,)), self.options)

    def _ask(self, row: SourceRow, name: str) -> None:
        delay_s = row.seconds("delay_seconds") if row.get("delay_seconds") is not None else 0.0
        self.waiting = {
            "id": name,
            "messages": tuple(self.messages),
            "input_tokens": self.input_tokens,
            "output_tokens": row.whole_or(self.limit, *LIMITS, least=1),
            "parent": self.parent,
            "think_s": delay_s if self.parent is not None else None,
        }

    def end(self, answer_tokens: int | None) -> TraceRequest | None:
        """Return the request that waits, if any, with the length of its answer or its limit."""
        if self.waiting is None:
            return None
        fields, self.waiting = self.waiting, None
        limit = fields["output_tokens"] or self.options.output_tokens or UNKNOWN_OUTPUT_TOKENS
        fields["output_tokens"] = limit if answer_tokens is None else answer_tokens
        self.parent = fields["id"]
        return TraceRequest(arrival_s=0.0, session=self.name, **self.shared, **fields)


@row_format(
    name="mlperf-agentic",
    what="the agentic data set of MLPerf Endpoints: a row for each message",
    keeps="messages, tools, model, sessions, parents, think times",
    recognise=lambda head: (
        head.has("conversation_id", "turn", "role") or head.first.get("_type") == "dataset_metadata"
    ),
    rows=conversations,
    order=Order(rebase=False),
)
def mlperf_agentic(joined: SourceRow, options: ReadOptions) -> Iterator[TraceRequest]:
    rows: list[SourceRow] = joined.values["rows"]
    conversation = _begin(rows, options)
    for row in rows:
        try:
            ended = conversation.read(row)
        except RowError as error:
            raise RowError(f"{error} (line {row.number})") from error
        if ended is not None:
            yield replace(ended, arrival_s=row.second())
    if (ended := conversation.end(None)) is not None:
        yield replace(ended, arrival_s=joined.second())


def _begin(rows: list[SourceRow], options: ReadOptions) -> _Conversation:
    """Start a conversation with its system prompt, and what its first user row has for all."""
    first = next((row for row in rows if row.text("role") == "user"), rows[0])
    shared = of_body({key: first.get(key) for key in ("model", "tools")}, options)
    begun = _Conversation(
        name=str(rows[0].required("conversation_id")),
        options=options,
        shared=shared,
        limit=first.whole_or(None, *LIMITS, least=1),
    )
    system = next((text for row in rows if (text := row.text("system"))), None)
    if system is not None:
        begun.add({"role": "system", "content": system})
    return begun


def _answer_tokens(message: dict[str, Any], options: ReadOptions) -> int:
    text = messages_text((message,)).removeprefix("assistant: ").removesuffix("\n")
    return text_tokens(f"{message.get('reasoning_content') or ''}{text}", options)


def _client_messages(row: SourceRow) -> Iterable[dict[str, Any]]:
    """Return the messages of a user or tool row. Each result of a tool is one message."""
    results = row.get("tool_results")
    if results is None:
        return (_message(row),)
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise RowError("tool_results: not a list of objects")
    return [
        {"role": "tool", "tool_call_id": result.get("tool_call_id"), "content": result["content"]}
        for result in results
    ]


def _message(row: SourceRow) -> dict[str, Any]:
    message = {key: row.get(key) for key in KEPT if row.get(key) is not None}
    return message if "content" in message else {**message, "content": None}
