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
from itertools import islice
from typing import Any

from forebay.traces.formats.table import COMPLETION, ReadOptions, row_format
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.reader import Ended
from forebay.traces.rows import NotARequestError, RowError, SourceRow

BLOCK_TOKENS = 64
INPUTS = frozenset(("user_message", "tool_result"))
OUTPUTS = frozenset(("reasoning", "text", "tool_call"))


@row_format(
    name="tracelab",
    what="TraceLab: rounds of Claude Code and Codex, JSONL or JSONL.GZ",
    keeps="blocks of 64 tokens made from cached lengths, sessions, parents, think times, "
    "model, user as tenant",
    recognise=lambda head: head.has(
        "session_id", "prefix_tokens", "newly_append_tokens", "timing_events"
    ),
    order=COMPLETION,
)
def tracelab(row: SourceRow, options: ReadOptions) -> Ended:
    session = str(row.required("session_id"))
    if not row.get("input_tokens_total"):
        raise NotARequestError("rounds without a number of input tokens")
    sent_s, end_s = _times(row)
    input_tokens = row.whole("input_tokens_total", least=1)
    block_tokens = options.block_tokens or BLOCK_TOKENS
    request = TraceRequest(
        id=f"round-{row.number}",
        arrival_s=sent_s,
        input_tokens=input_tokens,
        output_tokens=row.whole_or(0, "output_tokens"),
        blocks=_blocks(row, session, input_tokens, block_tokens),
        block_tokens=block_tokens,
        session=session,
        tenant=row.text("user"),
        model=row.text("model"),
    )
    return Ended(request, end_s)


def _blocks(row: SourceRow, session: str, input_tokens: int, size: int) -> tuple[int, ...]:
    """Make the blocks of a prompt. Ids count from 0 and are valid within one file."""
    prompts: dict[str, tuple[int, ...]] = row.facts.memory
    cached_tokens = row.whole_or(0, "prefix_tokens")
    full = input_tokens // size
    cached = prompts.get(session, ())[: min(cached_tokens // size, full)]
    whole = (*cached, *islice(row.facts.places, full - len(cached)))
    prompts[session] = whole
    # The last block is partial and never shared.
    return (*whole, next(row.facts.places)) if input_tokens % size else whole


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
