"""TraceLab: times from events, and blocks from how much of each prompt was cached."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.traces.formats import ReadOptions, detect, open_trace
from forebay.traces.ground.errors import InputError
from forebay.traces.reading.reader import TraceReader


def event(kind: str, second: float) -> dict[str, Any]:
    return {"event_type": kind, "timestamp": f"2026-06-01T05:40:{second:06.3f}Z", "source": "x"}


def row(session: str, tokens: int, cached: int, *events: dict[str, Any], **more: Any) -> Any:
    return {
        "provider": "claude", "session_id": session, "round_index": 0, "model": "m",
        "input_tokens_total": tokens, "prefix_tokens": cached,
        "newly_append_tokens": tokens - cached, "output_tokens": 9,
        "reasoning_output_tokens": 4, "timing_events": list(events), "tools": [], **more,
    }  # fmt: skip


def opened(folder: Path, *rows: Any, **options: Any) -> TraceReader:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return open_trace(path, options=ReadOptions(**options))


def test_a_round_is_sent_at_its_last_input_and_ends_at_its_last_output(tmp_path: Path) -> None:
    first, second = opened(
        tmp_path,
        row("s", 100, 0, event("user_message", 1), event("text", 4), event("tool_call", 6)),
        # The second result comes while the answer is written: it belongs to the next round.
        row("s", 200, 64, event("tool_result", 7), event("tool_result", 9.5),
            event("reasoning", 12), event("tool_result", 13), event("usage_report", 40)),
    )  # fmt: skip
    assert detect(tmp_path / "trace.jsonl") == "tracelab"
    assert (first.arrival_s, second.arrival_s) == (0.0, 8.5)
    assert (second.parent, second.think_s) == (first.id, 3.5)  # from 6 to 9.5
    assert (first.session, first.model, first.output_tokens) == ("s", "m", 9)


def test_a_prompt_begins_with_the_cached_blocks_of_the_prompt_before(tmp_path: Path) -> None:
    made = list(
        opened(
            tmp_path,
            row("s", 200, 150, event("user_message", 1)),
            row("s", 300, 195, event("user_message", 2)),
            row("other", 300, 195, event("user_message", 3)),
            row("s", 128, 70, event("user_message", 4)),  # compacted
            row("s", 256, 9_000, event("user_message", 5)),  # more than there is
        )
    )
    first, second, other, compacted, last = (one.blocks or () for one in made)
    assert [len(one.blocks or ()) for one in made] == [4, 5, 5, 2, 4]  # the partial one included
    assert second[:3] == first[:3]
    assert not set(second[3:]) & set(first)
    assert not set(other) & {*first, *second}
    assert compacted[0] == first[0]
    assert compacted[1] not in {*first, *second}
    assert last[:2] == compacted
    assert {one.block_tokens for one in made} == {64}
    big = opened(tmp_path, row("s", 200, 0, event("user_message", 1)), block_tokens=100)
    assert [len(one.blocks or ()) for one in big] == [2]


def test_rounds_without_time_or_length_are_counted(tmp_path: Path) -> None:
    reader = opened(
        tmp_path,
        row("s", 200, 0, event("text", 7)),
        row("s", 200, 0),
        row("s", 0, 0, event("text", 8)),
    )
    assert [one.arrival_s for one in reader] == [0.0]
    assert reader.ignored == {
        "rounds without a time": 1, "rounds without a number of input tokens": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"timing_events": 5}, "timing_events: not a list of objects"),
        ({"timing_events": [{"event_type": "text", "timestamp": "noon"}]}, "timestamp: 'noon'"),
        ({"input_tokens_total": -3}, "input_tokens_total: -3 is not a whole number"),
        ({"session_id": None}, "session_id: no such column"),
    ],
)
def test_a_bad_row_is_named(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        list(opened(tmp_path, {**row("s", 9, 0, event("text", 1)), **more}))
