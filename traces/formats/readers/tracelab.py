"""Read TraceLab: rounds of coding agents (Claude Code, Codex) as they were served in production.

A row is one call of a model: its session, the events of the call with their times, and how many
tokens of its prompt were cached (`prefix_tokens`). It has neither text nor hashes. So blocks are
made here: a prompt begins with as many blocks of its session's last prompt as were cached, and the
rest is new. Text that sessions share (tools, system prompt) is not credited, and sub-agents are
sessions of their own, as in the file. Source: uw-syfi/TraceLab, example_sessions/derived.

A call is sent at its last input (a user's message or a tool's result) before its first output, and
ends at its last output. `output_tokens` includes the tokens of reasoning.
"""

from collections.abc import Iterable
from itertools import count, islice
from typing import Any

from forebay.traces.formats.head import Head
from forebay.traces.formats.table import COMPLETION, ReadOptions, TraceFormat
from forebay.traces.reading.reader import Ended
from forebay.traces.rows import NotARequestError, RowError, SourceRow
from forebay.traces.schema import TraceRequest

BLOCK_TOKENS = 64
INPUTS = frozenset(("user_message", "tool_result"))
OUTPUTS = frozenset(("reasoning", "text", "tool_call"))


class _Rounds:
    """Makes blocks of each session's prompts. Ids count from 0 and are valid within one file."""

    def __init__(self, options: ReadOptions) -> None:
        self._block_tokens = options.block_tokens or BLOCK_TOKENS
        self._fresh = count()
        self._sessions: dict[str, tuple[int, ...]] = {}

    def parse(self, row: SourceRow) -> Ended:
        session = str(row.required("session_id"))
        if not row.get("input_tokens_total"):
            raise NotARequestError("rounds without a number of input tokens")
        sent_s, end_s = _times(row)
        input_tokens = row.whole("input_tokens_total", least=1)
        return Ended(
            TraceRequest(
                id=f"round-{row.number}",
                arrival_s=sent_s,
                input_tokens=input_tokens,
                output_tokens=row.whole_or(0, "output_tokens") or 0,
                blocks=self._blocks(session, input_tokens, row.whole_or(0, "prefix_tokens") or 0),
                block_tokens=self._block_tokens,
                session=session,
                tenant=row.text("user"),
                model=row.text("model"),
            ),
            end_s,
        )

    def _blocks(self, session: str, input_tokens: int, cached_tokens: int) -> tuple[int, ...]:
        size = self._block_tokens
        full = input_tokens // size
        last = self._sessions.get(session, ())
        cached = last[: min(cached_tokens // size, full)]
        whole = (*cached, *islice(self._fresh, full - len(cached)))
        self._sessions[session] = whole
        # The last block is partial and never shared.
        return (*whole, next(self._fresh)) if input_tokens % size else whole


def _times(row: SourceRow) -> tuple[float, float | None]:
    """Return when a round was sent and when its answer ended, in seconds."""
    events = row.required("timing_events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise RowError("timing_events: not a list of objects")
    outputs = _moments(row, events, OUTPUTS)
    first_s = min(outputs, default=None)
    inputs = [at_s for at_s in _moments(row, events, INPUTS) if first_s is None or at_s <= first_s]
    if not inputs and first_s is None:
        raise NotARequestError("rounds without a time")
    sent_s = max(inputs) if inputs or first_s is None else first_s
    return sent_s, max(outputs, default=None)


def _moments(
    row: SourceRow, events: Iterable[dict[str, Any]], kinds: frozenset[str]
) -> list[float]:
    return [
        row.with_values(event).moment("timestamp", unit="iso8601")
        for event in events
        if event.get("event_type") in kinds and event.get("timestamp")
    ]


def _recognise(head: Head) -> bool:
    return head.has("session_id", "prefix_tokens", "newly_append_tokens", "timing_events")


FORMATS = (
    TraceFormat(
        name="tracelab",
        what="TraceLab: rounds of Claude Code and Codex, JSONL or JSONL.GZ",
        keeps="blocks of 64 tokens made from cached lengths, sessions, parents, think times, "
        "model, user as tenant",
        recognise=_recognise,
        parser=lambda options: _Rounds(options).parse,
        order=COMPLETION,
    ),
)
