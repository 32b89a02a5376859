"""Cells that are no value, columns that count no tokens, and other shapes of known files."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import forebay, imported, refusal

from forebay.traces.formats import ReadOptions, open_trace

HEADER = "timestamp,{},output_tokens\n2026-01-05T10:00:00Z,1500,80\n"
CHAT = "POST /v1/chat/completions HTTP/1.1"
WHEN = "2026-04-06T10:00:00Z"


def refused(path: Path) -> str:
    """Import a file that is refused, and return what the command says."""
    done = forebay("traces", "import", "auto", path, "-o", path.with_suffix(".trace"))
    assert done.returncode == 2
    return done.stderr


@pytest.mark.parametrize("name", ["input_tokens", "num_prompt_tokens", "promptTokens"])
@pytest.mark.parametrize(
    "cell", ["NULL", "N/A", "-", "nan", "inf", "", "true", "12k", "1_200", "\\N"]
)
def test_an_odd_cell_never_turns_counts_into_prompts(name: str, cell: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEADER.format(name) + f"2026-01-05T10:00:01Z,{cell},9\n")
    assert "a.csv:3: " in refused(path)
    rows, _ = imported(path, "--skip-bad")
    assert [(row.input_tokens, row.text) for row in rows] == [(1500, None)]


@pytest.mark.parametrize("cell", ['"1,200"', "1 200", "1\u202f200", "1200.0"])
def test_a_number_with_signs_between_its_thousands_is_that_number(
    cell: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEADER.format("prompt_tokens") + f"2026-01-05T10:00:01Z,{cell},9\n")
    rows, _ = imported(path)
    assert [row.input_tokens for row in rows] == [1500, 1200]


def test_names_that_hold_no_value_group_no_requests(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    lines = "".join(f"2026-01-05T10:00:0{n}Z,5,9,NULL,-\n" for n in range(3))
    path.write_text("timestamp,prompt_tokens,output_tokens,session_id,tenant\n" + lines)
    mapping = "arrival=timestamp,input=prompt_tokens,output=output_tokens"
    rows, _ = imported(path, "--map", f"{mapping},session=session_id,tenant=tenant")
    assert {(row.session, row.tenant, row.parent) for row in rows} == {(None, None, None)}


BALANCER = {"httpRequest": {"requestSize": "4200", "status": 200, "responseSize": "9100",
                            "latency": "2.5s"}, "timestamp": WHEN}  # fmt: skip
TRAEFIK = {"RequestContentSize": 4200, "OriginContentSize": 9100, "Duration": 25, "StartUTC": WHEN}
BEDROCK = {"timestamp": WHEN, "requestId": "r1",
           "input": {"inputContentType": "application/json", "inputTokenCount": 2716},
           "output": {"outputContentType": "application/json",
                      "outputTokenCount": 120}}  # fmt: skip


@pytest.mark.parametrize(
    "line", [BALANCER, TRAEFIK, {"time": WHEN, "request_length": 900, "response_length": 90}]
)
def test_a_size_in_bytes_is_no_number_of_tokens(line: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps(line) + "\n")
    assert "no prompt length" in refused(path)


def test_a_content_type_is_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(BEDROCK) + "\n")
    rows, _ = imported(path)
    assert [(row.input_tokens, row.output_tokens, row.text) for row in rows] == [(2716, 120, None)]


def test_a_prompt_that_contradicts_its_count_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"ts": WHEN, "prompt": "[redacted]", "prompt_tokens": 2716, "output_tokens": 5}
    path.write_text(json.dumps(row) + "\n")
    assert "10 characters, and its count says 2,716 tokens" in refused(path)


def test_what_was_guessed_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time,prompt_len,output_tokens,latency\n1,30,5,250\n2,40,6,300\n")
    _, said = imported(path)
    assert "prompt_len is taken as input tokens, which its name does not say; give --map" in said
    assert "time is taken as arrival in s, which" in said
    assert "latency is taken as duration in ms, which" in said
    assert "output_tokens is taken" not in said


def test_prompts_without_times(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"request_id": "r1", "prompt": "What is the capital of France?"}\n')
    for said in (refused(path), refusal("traces", "describe", path)):
        assert "traces import prompts" in said
    rows, _ = imported(path, "--map", "text=prompt", "--output-tokens", "5")
    assert [(row.arrival_s, row.text) for row in rows] == [(0.0, "What is the capital of France?")]


def test_the_context_of_a_question_is_part_of_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input": "Who?", "context": "word " * 900, "length": 900}) + "\n")
    options = ReadOptions(tokens="estimate", output_tokens=5)
    (row,) = open_trace(path, format_name="prompts", options=options)
    assert row.input_tokens > 800


@pytest.mark.parametrize("unit", [None, "s"])
def test_the_unit_of_mooncake_can_be_said(unit: str | None, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"timestamp": at, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
            for at in (0, 0.5, 1.0)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, told = imported(path, *(("--time-unit", unit) if unit else ()))
    assert found[-1].arrival_s == (1.0 if unit else 0.001)
    assert ("--time-unit s" in told) == ("note: 3,000 requests a second; if" in told) == (not unit)


@pytest.mark.parametrize("first", [r"\x16\x03\x01", "", "-", "MGLNDD_1.2.3.4_443", r"a\"b"])
def test_lines_of_scanners_are_no_requests(first: str, tmp_path: Path) -> None:
    path = tmp_path / "ng.log"
    line = '1.2.3.4 - - [05/Jan/2026:10:00:0{} +0000] "{}" 400 157 "-" "-" request_length=4200\n'
    path.write_text(line.format(1, first) + line.format(2, CHAT) + line.format(3, CHAT))
    rows, _ = imported(path)
    assert [row.id for row in rows] == ["nginx-2", "nginx-3"]


def test_a_log_that_is_no_table_is_not_printed_as_columns(tmp_path: Path) -> None:
    path = tmp_path / "ha.log"
    line = 'Feb  6 12:14:14 localhost haproxy[14389]: 10.0.1.2:33317 in srv1 200 2750 {1wt.eu} "'
    path.write_text((line + CHAT + '"\n') * 2)
    said = refused(path)
    assert "no table with a header" in said
    assert "10.0.1.2" not in said


USAGE = {"gen_ai.usage.input_tokens": 700, "gen_ai.usage.output_tokens": 50}
NET = [{"key": f"gen_ai.response.{side}_tokens", "value": {"intValue": count}}
       for side, count in (("input", "700"), ("output", "50"))]  # fmt: skip
SNAKE = [{"key": key, "value": {"int_value": str(count)}} for key, count in USAGE.items()]
STAMPS = {
    "start_time_unix_nano": "1700000000000000000",
    "end_time_unix_nano": "1700000002000000000",
}


@pytest.mark.parametrize(
    "document",
    [
        {"resourceSpans": [{"scopeSpans": [{"spans": [
            {"spanId": "b", "startTimeUnixNano": "1700000000000000000", "attributes": NET}]}]}]},
        {"resource_spans": [{"scope_spans": [{"spans": [
            {"span_id": "b", **STAMPS, "attributes": SNAKE}]}]}]},
        {"trace_id": "t", "span_count": 1, "spans": [
            {"trace_id": "t", "span_id": "b", "start_time": WHEN, "end_time": WHEN,
             "attributes": USAGE}]},
    ],
    ids=[".NET's names", "snake case", "a trace of inference-perf"],
)  # fmt: skip
def test_spans_under_other_names(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(document))
    rows, _ = imported(path)
    assert [(row.id, row.input_tokens, row.output_tokens) for row in rows] == [("b", 700, 50)]


@pytest.mark.parametrize(
    ("row", "requests"),
    [
        ({"id": "1", "items": [{"from": "human", "value": "Hi"},
                               {"from": "gpt", "value": "Ho"}]}, 1),
        ({"id": "1", "conversations": [
            {"from": "human", "value": "Hi"}, {"from": "function_call", "value": "{}"},
            {"from": "observation", "value": "42"}, {"from": "gpt", "value": "Ho"}]}, 2),
        ({"conversation_hash": "x", "timestamp": WHEN, "conversation": [
            {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}, 1),
    ],
    ids=["items", "calls of functions", "WildChat"],
)  # fmt: skip
def test_chats_of_other_shapes(row: dict[str, Any], requests: int, tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    bad = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": None}]}
    path.write_text(json.dumps([row, bad]))
    rows, said = imported(path, "--tokens", "estimate")
    assert len(rows) == requests
    assert "1 conversations with a turn that has no text" in said
