"""MLPerf's agentic data set: a row for each message becomes a request for each turn of a client."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.traces.formats import ReadOptions, detect, open_trace
from forebay.traces.formats.readers import mlperf
from forebay.traces.ground.errors import InputError
from forebay.traces.reading.reader import TraceReader

CALL = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]


def message(chat: str, turn: int, role: str, **more: Any) -> dict[str, Any]:
    return {"conversation_id": chat, "turn": turn, "role": role, **more}


CHAT = (
    message("a", 1, "user", content="word " * 40, system="be brief", tools=TOOLS, model="m",
            delay_seconds=0.4),
    message("a", 2, "assistant", tool_calls=[CALL], reasoning_content="hm " * 20),
    message("a", 3, "tool", delay_seconds=1.2, tool_results=[
        {"tool_call_id": "c", "content": "x.py"}, {"tool_call_id": "d", "content": "y.py"}]),
    message("a", 4, "assistant", content="done"),
)  # fmt: skip


def opened(folder: Path, *rows: Any, **options: Any) -> TraceReader:
    path = folder / "mlperf.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return open_trace(path, options=ReadOptions(tokens="estimate", **options))


def test_each_turn_of_a_client_is_a_request_with_its_history(tmp_path: Path) -> None:
    first, second = opened(tmp_path, {"_type": "dataset_metadata", "version": 1}, *CHAT)
    assert detect(tmp_path / "mlperf.jsonl") == "mlperf-agentic"
    assert [one["role"] for one in first.messages or ()] == ["system", "user"]
    assert [one["role"] for one in second.messages or ()] == [
        "system", "user", "assistant", "tool", "tool"
    ]  # fmt: skip
    assert second.messages is not None
    assert second.messages[2] == {
        "role": "assistant", "content": None, "tool_calls": [CALL],
        "reasoning_content": "hm " * 20,
    }  # fmt: skip
    assert second.messages[4] == {"role": "tool", "tool_call_id": "d", "content": "y.py"}
    assert (first.id, first.session, first.parent, first.think_s) == ("a-1", "a", None, None)
    assert (second.id, second.parent, second.think_s) == ("a-3", "a-1", 1.2)
    assert (first.model, second.model) == ("m", "m")
    assert first.tools == second.tools == tuple(TOOLS)
    # Four bytes a token. "system: be brief\n" has 17 bytes, "user: " and 40 words 207.
    assert first.input_tokens == 5 + 52
    # Sixty bytes of reasoning, and 72 of the call as JSON.
    assert first.output_tokens == 33
    assert second.output_tokens == 1


def test_a_turn_without_an_answer_has_its_limit(tmp_path: Path) -> None:
    chats = [
        message("a", 1, "user", content="hi", max_new_tokens=7),
        message("a", 2, "assistant", tool_calls=[CALL]),
        message("a", 3, "tool", tool_results=[{"tool_call_id": "c", "content": "x"}]),
        message("b", 1, "user", content="hi"),
    ]
    lengths = [one.output_tokens for one in opened(tmp_path, *chats)]
    assert lengths[1:] == [7, 128]
    lengths = [one.output_tokens for one in opened(tmp_path, *chats, output_tokens=30)]
    assert lengths[1:] == [7, 30]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ((*CHAT, message("b", 1, "user", content="x"), message("a", 5, "user", content="x")),
         "6: rows of conversation 'a' are not together; sort the file by it"),
        ((CHAT[0], CHAT[0]), r"1: turn 1 stands after turn 1 \(line 2\)"),
        ((message("a", 1, "bot", content="x"),), "role 'bot' is not user, assistant or tool"),
        ((message("a", 1, "user", content="x", tools=5),), "tools: 5 is not a list of objects"),
        ((message("a", 1, "user", content="x", delay_seconds=-1),), "delay_seconds: -1 is not"),
        ((message("a", 1, "tool", tool_results=["x"]),), "tool_results: not a list of objects"),
        ((message("", 1, "user", content="x"),), "conversation_id: no such column"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(rows: tuple[Any, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        list(opened(tmp_path, *rows))


def test_a_conversation_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlperf, "MOST_ROWS", 3)
    with pytest.raises(InputError, match="4: conversation 'a' has more than 3 rows"):
        list(opened(tmp_path, *CHAT))
