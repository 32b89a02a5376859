"""Whole prompts and whole answers of every usage shape, right to the token."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import refusal, remarks

from forebay.traces.formats import ReadOptions, detect, open_trace
from forebay.traces.formats.columns import map_text, mapped_format, parse_map
from forebay.traces.formats.guess import guess
from forebay.traces.formats.usage import whole_usage
from forebay.traces.rows import RowError

# usage, prompt, answer, whether the parts add up
SHAPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "OpenAI chat: cached and reasoning are parts": (
        {"prompt_tokens": 700, "completion_tokens": 50, "total_tokens": 750,
         "prompt_tokens_details": {"cached_tokens": 600},
         "completion_tokens_details": {"reasoning_tokens": 40}}, 700, 50),
    "OpenAI responses": (
        {"input_tokens": 700, "input_tokens_details": {"cached_tokens": 600},
         "output_tokens": 50, "output_tokens_details": {"reasoning_tokens": 40},
         "total_tokens": 750}, 700, 50),
    "Anthropic: caches are beside the input": (
        {"input_tokens": 1600, "cache_read_input_tokens": 115000,
         "cache_creation_input_tokens": 20, "output_tokens": 225,
         "cache_creation": {"ephemeral_5m_input_tokens": 20}}, 116620, 225),
    "Langfuse: a long cached prompt": (
        {"input": 1600, "cache_read_input_tokens": 115000, "output": 225, "total": 116825},
        116600, 225),
    "Langfuse: input_cached_tokens": (
        {"input": 600, "input_cached_tokens": 100, "output": 50, "total": 750}, 700, 50),
    "Langfuse: read and created": (
        {"input": 600, "cache_read_input_tokens": 150, "cache_creation_input_tokens": 20,
         "output": 50, "total": 820}, 770, 50),
    "Langfuse: reasoning": (
        {"input": 700, "output": 40, "output_reasoning_tokens": 60, "total": 800}, 700, 100),
    "Langfuse: the total says that the cached are in it": (
        {"input": 700, "input_cached_tokens": 100, "output": 50, "total": 750}, 700, 50),
    "Gemini: thoughts are beside, cached are in": (
        {"promptTokenCount": 700, "cachedContentTokenCount": 600, "candidatesTokenCount": 40,
         "thoughtsTokenCount": 60, "totalTokenCount": 800}, 700, 100),
    "Bedrock": (
        {"inputTokens": 600, "outputTokens": 50, "cacheReadInputTokens": 100,
         "cacheWriteInputTokens": 20, "totalTokens": 770}, 720, 50),
    "LiteLLM: prompt_tokens are whole": (
        {"prompt_tokens": 770, "completion_tokens": 50, "total_tokens": 820,
         "cache_read_input_tokens": 150, "cache_creation_input_tokens": 20}, 770, 50),
    "OpenTelemetry: input_tokens are whole": (
        {"gen_ai.usage.input_tokens": 700, "gen_ai.usage.cache_read.input_tokens": 600,
         "gen_ai.usage.output_tokens": 50}, 700, 50),
    "OpenTelemetry, old names": (
        {"gen_ai.usage.prompt_tokens": 700, "gen_ai.usage.completion_tokens": 50,
         "llm.usage.total_tokens": 750}, 700, 50),
    "OpenInference": (
        {"llm.token_count.prompt": 700, "llm.token_count.completion": 50,
         "llm.token_count.prompt_details.cache_read": 600, "llm.token_count.total": 750},
        700, 50),
    "Claude Code": (
        {"input_tokens": 100, "output_tokens": 50, "cache_read_tokens": 580,
         "cache_creation_tokens": 20}, 700, 50),
    "Codex": (
        {"input_tokens": 700, "cached_input_tokens": 600, "output_tokens": 50,
         "reasoning_output_tokens": 40, "total_tokens": 750}, 700, 50),
    "DeepSeek: hit and miss make the prompt": (
        {"prompt_tokens": 700, "prompt_cache_hit_tokens": 600, "prompt_cache_miss_tokens": 100,
         "completion_tokens": 50, "total_tokens": 750}, 700, 50),
    "a cached part that is larger than the prompt is beside it": (
        {"prompt_tokens": 10, "completion_tokens": 50, "prompt_cache_read_tokens": 690}, 700, 50),
    "Ollama": ({"prompt_eval_count": 700, "eval_count": 50}, 700, 50),
    "text of a CSV file": ({"prompt_tokens": "700", "completion_tokens": "50"}, 700, 50),
    "costs beside counts": (
        {"prompt_tokens": 700, "completion_tokens": 50, "cost": 0.003, "cache_discount": -0.1,
         "is_byok": False}, 700, 50),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_the_whole_prompt_and_answer(name: str) -> None:
    usage, prompt, answer = SHAPES[name]
    assert whole_usage(usage) == (prompt, answer, True)


def test_parts_that_give_no_total_are_told() -> None:
    usage = {"input": 600, "input_cached_tokens": 100, "output": 50, "total": 999}
    assert whole_usage(usage) == (700, 50, False)
    naive = {"input_tokens": 1600, "cache_read_input_tokens": 115000, "output_tokens": 225,
             "total_tokens": 1825}  # fmt: skip
    assert whole_usage(naive) == (116600, 225, False)
    assert whole_usage({}) == (None, None, True)


@pytest.mark.parametrize("count", [-1, True, "many", 0.5])
def test_a_count_that_is_none_is_an_error_that_names_it(count: Any) -> None:
    with pytest.raises(RowError, match=r"prompt_tokens: .* is not a whole number of 0 or more"):
        whole_usage({"prompt_tokens": count, "completion_tokens": 5})


ANTHROPIC = SHAPES["Anthropic: caches are beside the input"][0]
LANGFUSE = SHAPES["Langfuse: a long cached prompt"][0]
TIMES = {"startTime": "2026-11-26T08:00:00Z", "endTime": "2026-11-26T08:00:09Z"}


def otlp(**attributes: Any) -> dict[str, Any]:
    listed = [
        {"key": key, "value": {"intValue": str(value)} if type(value) is int
         else {"stringValue": value}} for key, value in attributes.items()
    ]  # fmt: skip
    span = {"traceId": "t", "spanId": "s", "name": "n", "attributes": listed,
            "startTimeUnixNano": "1764000000000000000",
            "endTimeUnixNano": "1764000001000000000"}  # fmt: skip
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


ROWS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "langfuse": (
        "langfuse", {"id": "a", "traceId": "t", **TIMES, "usageDetails": LANGFUSE}, 116600, 225),
    "langfuse with JSON in a column": (
        "langfuse",
        {"id": "a", "trace_id": "t", "start_time": TIMES["startTime"],
         "usage_details": json.dumps(LANGFUSE)}, 116600, 225),
    "anthropic log": (
        "openai-log",
        {"timestamp": 1764000000, "request": {"messages": [{"role": "user", "content": "Hi"}]},
         "response": {"content": [], "usage": ANTHROPIC}}, 116620, 225),
    "litellm": (
        "litellm",
        {"request_id": "a", "call_type": "acompletion", **TIMES, "prompt_tokens": 770,
         "completion_tokens": 50, "total_tokens": 820, "cache_read_input_tokens": 150}, 770, 50),
    "helicone": (
        "openai-log",
        {"request_created_at": "2026-11-26T08:00:00Z", "prompt_tokens": 5,
         "request_body": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
         "response_body": {"usage": ANTHROPIC}}, 116620, 225),
    "openinference": (
        "otel",
        otlp(**{"openinference.span.kind": "LLM", "llm.token_count.prompt": 700,
                "llm.token_count.completion": 50, "llm.model_name": "m",
                "llm.input_messages.0.message.role": "user",
                "llm.input_messages.0.message.content": "Hi"}), 700, 50),
    "claude code": (
        "otel",
        otlp(**{"span.type": "llm_request", "input_tokens": 100, "output_tokens": 50,
                "cache_read_tokens": 600, "session.id": "c", "model": "claude"}), 700, 50),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_every_reader_adds_up(name: str, tmp_path: Path) -> None:
    form, row, prompt, answer = ROWS[name]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert detect(path) == form
    (found,) = open_trace(path, options=ReadOptions(tokens="estimate"))
    assert (found.input_tokens, found.output_tokens) == (prompt, answer)


def test_the_import_says_where_parts_do_not_add_up(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    row = {"id": "a", "traceId": "t", **TIMES, "usageDetails": {**LANGFUSE, "total": 5}}
    path.write_text(json.dumps(row) + "\n")
    said = remarks("traces", "import", "langfuse", path, "-o", tmp_path / "t")
    assert "1 usages whose parts do not add up to their total" in said


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"gen_ai.operation.name": "chat", "gen_ai.usage.output_tokens": 5},
         "no attribute gen_ai.usage.input_tokens, llm.token_count.prompt or input_tokens in"),
        ({"openinference.span.kind": "LLM"}, "no attribute gen_ai.usage.input_tokens"),
        ({"openinference.span.kind": "AGENT", "llm.token_count.prompt": 9}, "spans of kind AGENT"),
        ({"span.type": "interaction", "input_tokens": 9}, "1 spans of kind interaction"),
    ],
)  # fmt: skip
def test_a_span_without_counts_is_one_line(
    attributes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(otlp(**attributes)) + "\n")
    said = refusal("traces", "import", "auto", path, "-o", tmp_path / "t")
    assert says in said


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        ({"ts": 5, "usage": ANTHROPIC}, "arrival=ts:s,usage=usage"),
        ({"ts": 5, **ANTHROPIC}, "arrival=ts:s,usage=*"),
        ({"ts": 5, "usage": SHAPES["OpenAI chat: cached and reasoning are parts"][0]},
         "arrival=ts:s,input=usage.prompt_tokens,output=usage.completion_tokens"),
    ],
)  # fmt: skip
def test_a_guess_takes_the_whole_usage_where_its_parts_add_up(
    row: dict[str, Any], mapping: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert map_text(guess(path)) == mapping
    (found,) = mapped_format(parse_map(mapping)).open(path)
    expected = (700, 50) if "prompt_tokens" in mapping else (116620, 225)
    assert (found.input_tokens, found.output_tokens) == expected
