"""replay/results/verdict.py: a verdict is of the load that was asked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from stages.replay_server import DONE, Behaviour, Server, rows, run_one, stream, table, text, usage

from forebay.analysis.compare.compare import compare
from forebay.analysis.compare.headline import headline
from forebay.analysis.runs.load import load_run
from forebay.replay.results.printed_table import summary_table
from forebay.replay.results.row import Row, row_with
from forebay.replay.results.verdict import Lengths
from forebay.traces.ground.schema import TraceRequest

Body = dict[str, Any]


def gives(tokens: int, prompt: int = 32, counted: bool = True) -> Behaviour:
    """Answer with `tokens` events, whatever was asked."""

    async def behave(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
        response = await stream(request)
        for _ in range(tokens):
            await response.write(text("word "))
        if counted:
            await response.write(usage(prompt, tokens))
        await response.write(DONE)
        return response

    return behave


def trace(output: int = 32) -> list[TraceRequest]:
    return [replace(row, output_tokens=output) for row in rows(6)]


def test_short_answers_are_another_load(tmp_path: Path) -> None:
    short, _ = run_one(tmp_path / "short", trace(), Server(gives(8)))
    whole, _ = run_one(tmp_path / "whole", trace(), Server(gives(32)))
    said = "answers have 8 of 32 tokens (means), 25 % of the trace's length; 6 of 6 differ"
    assert (short.values["verdict"], short.values["verdict_reason"]) == ("other-load", said)
    assert whole.values["verdict"] == "valid"
    assert whole.values["warnings"] == []
    compared = compare(load_run(whole.folder), load_run(short.folder))
    assert "the load was another than the trace's in short" in headline(compared).summary
    assert not any("delays of the client" in line for line in compared.warnings)
    assert [row["asked_tokens"] for row in table(short.folder)] == [32] * 6


def test_lengths_that_differ_a_little_are_said_and_free_lengths_are_not(tmp_path: Path) -> None:
    some, _ = run_one(tmp_path / "some", trace(), Server(gives(28)))
    assert some.values["verdict"] == "valid"
    assert some.values["warnings"] == [
        "answers have 28 of 32 tokens (means), 88 % of the trace's length; 6 of 6 differ"
    ]
    free, _ = run_one(tmp_path / "free", trace(), Server(gives(8)), lengths="free")
    assert (free.values["verdict"], free.values["warnings"]) == ("valid", [])


def test_prompts_of_another_length_are_said(tmp_path: Path) -> None:
    run, _ = run_one(tmp_path / "run", trace(8), Server(gives(8, prompt=400)))
    said = "prompts have 400 tokens by the servers' count and 32 by the trace's (means)"
    assert run.values["warnings"] == [said]


def test_tokens_that_nobody_counted_are_not_zero(tmp_path: Path) -> None:
    run, _ = run_one(tmp_path / "run", trace(8), Server(gives(8, counted=False)))
    values = run.values
    assert [values[f"{of}_tokens_per_s"] for of in ("output", "prompt", "total")] == [None] * 3
    assert values["tpot_ms"]["all"]["count"] == 0
    assert values["warnings"][0].startswith("6 answers came without usage: their tokens are not")
    assert summary_table(values) is not None
    alone = load_run(run.folder)
    assert compare(alone, alone).line("all requests", "output_tokens_per_s") is None


@pytest.mark.parametrize(("got", "judged"), [(32, False), (17, False), (15, True), (70, True)])
def test_beyond_half_the_verdict_is_not_valid(got: int, judged: bool) -> None:
    lengths = Lengths()
    asked = TraceRequest("r", 0.0, 32, 32)
    row: Row = row_with(asked, "chat", None, {"outcome": "ok", "output_tokens": got})
    lengths.add(row)
    assert (lengths.judge() is not None) == judged


def test_a_lone_surrogate_is_output_and_a_large_event_has_a_reason(tmp_path: Path) -> None:
    def sends(data: bytes) -> Behaviour:
        async def behave(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
            response = await stream(request)
            await response.write(b"data: " + data + b"\n\n")
            await response.write(usage(32, 1))
            await response.write(DONE)
            return response

        return behave

    half = rb'{"choices":[{"index":0,"text":"x \ud83d","finish_reason":null}]}'
    kept, _ = run_one(tmp_path / "half", trace(1), Server(sends(half)), keep_answers=True)
    assert kept.values["completed"] == 6
    lines = (kept.folder / "answers.jsonl").read_bytes().splitlines()
    assert {orjson.loads(line)["answer"] for line in lines} == {"x ?"}
    large = b'{"choices":[{"index":0,"text":"%b"}]}' % (b"a" * (5 << 20))
    failed, _ = run_one(tmp_path / "large", trace(1)[:1], Server(sends(large)))
    (unanswered,) = failed.values["unanswered"]
    assert unanswered["reason"] == "malformed"
    assert unanswered["said"] == "an event of more than 4194304 bytes"


def test_a_run_that_was_stopped_is_judged_by_what_was_sent(tmp_path: Path) -> None:
    late = [replace(row, arrival_s=float(at)) for at, row in enumerate(rows(10))]
    run, _ = run_one(tmp_path / "run", late, Server(), stop_at_s=(3.5,))
    values = run.values
    assert (values["verdict"], values["failed"]) == ("interrupted", {"never_sent": 6})
    assert values["attainment"] == values["attainment_by_bucket"]["chat"] == 1.0
