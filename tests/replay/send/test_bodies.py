"""A replay sends what was captured: messages, tools, model, tenant, class, deadlines, ..."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from stages.replay_server import Server, rows, run_one, table

from forebay.replay.plan.target import read_keys
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

MESSAGES = ({"role": "system", "content": "be brief"}, {"role": "user", "content": 'hé "x"'})
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {}}},)


def test_messages_tools_and_parameters_are_sent_as_captured(tmp_path: Path) -> None:
    row = TraceRequest(
        "r0", 0.0, 12, 4, messages=MESSAGES, tools=TOOLS,
        parameters={"stop": ["END"], "temperature": 0.7, "max_tokens": 900, "stream": False},
    )  # fmt: skip
    summary, server = run_one(tmp_path / "run", [row])
    assert summary.values["completed"] == 1
    (body,) = server.bodies
    assert body.pop("path") == "/v1/chat/completions"
    assert body == {
        "messages": list(MESSAGES),
        "tools": list(TOOLS),
        "stop": ["END"],
        "temperature": 0.7,
        "model": "tiny",
        "max_tokens": 4,  # the answer that production gave, so that the load is the same
        "min_tokens": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_free_lengths_leave_the_end_to_the_model(tmp_path: Path) -> None:
    trace = [TraceRequest("r0", 0.0, 12, 4, parameters={"max_completion_tokens": 9}),
             TraceRequest("r1", 0.1, 12, 4)]  # fmt: skip
    _, server = run_one(tmp_path / "run", trace, lengths="free")
    assert [body["max_tokens"] for body in server.bodies] == [9, 4]
    assert not any(key in body for body in server.bodies for key in ("min_tokens", "ignore_eos"))


async def in_one_piece(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
    choice = {"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}
    counts = {"prompt_tokens": 12, "completion_tokens": 4}
    return web.json_response({"choices": [choice], "usage": counts})


def test_an_answer_that_is_not_streamed_is_one_event(tmp_path: Path) -> None:
    trace = rows(2, stream=False)
    summary, server = run_one(tmp_path / "run", trace, Server(behaviour=in_one_piece))
    assert summary.values["completed"] == 2
    assert all(body["stream"] is False for body in server.bodies)
    assert all("stream_options" not in body for body in server.bodies)
    assert server.headers[0]["accept"] == "application/json"
    row = table(tmp_path / "run")[0]
    assert (row["output_tokens"], row["prompt_tokens"]) == (4, 12)
    assert row["ttft_response_s"] == row["e2e_response_s"] >= 0
    assert row["tpot_s"] is None


def test_an_html_page_is_not_an_answer(tmp_path: Path) -> None:
    async def page(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        return web.Response(text="<html>hello", content_type="text/html")

    for stream in (True, False):
        summary, _ = run_one(tmp_path / f"{stream}", rows(1, stream=stream), Server(page))
        assert summary.values["failed"] == {"malformed": 1}


def test_class_tenant_and_deadline_become_headers(tmp_path: Path) -> None:
    trace = [
        TraceRequest("r0", 0.0, 9, 1, tenant="acme", service_class="batch", deadline_s=30.0),
        TraceRequest("r1", 0.1, 9, 1, tenant="blue"),
        TraceRequest("r2", 0.2, 9, 1),
    ]
    keys = {"acme": "sk-a", "blue": "sk-b"}
    _, server = run_one(tmp_path / "run", trace, keys=keys, api_key="own")
    first, second, third = server.headers
    assert first["x-forebay-class"] == "batch"
    assert float(first["x-request-timeout"]) == 30.0
    assert "x-forebay-class" not in second
    assert "x-request-timeout" not in second
    given = [headers["authorization"] for headers in (first, second, third)]
    assert given == ["Bearer sk-a", "Bearer sk-b", "Bearer own"]


def test_a_tenant_without_a_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no key of tenant 'acme'"):
        run_one(tmp_path / "run", rows(1, tenant="acme"), keys={"blue": "sk-b"})


def test_a_client_leaves_when_its_deadline_has_passed(tmp_path: Path) -> None:
    server = Server(first_s=5.0)
    summary, _ = run_one(tmp_path / "run", rows(3, deadline_s=1.5), server)
    assert summary.values["failed"] == {"cancelled": 3}
    assert all(
        row["done_s"] == pytest.approx(row["intended_s"] + 1.5, abs=0.01)
        for row in table(tmp_path / "run")
    )


def test_rows_ask_for_the_model_that_they_name(tmp_path: Path) -> None:
    _, server = run_one(tmp_path / "run", rows(1, model="tiny"))
    assert server.bodies[0]["model"] == "tiny"
    with pytest.raises(InputError, match=r"ask for gpt-5, it serves tiny; --model sends all rows"):
        run_one(tmp_path / "other", rows(1, model="gpt-5"))
    _, server = run_one(tmp_path / "third", rows(1, model="gpt-5"), model="tiny")
    assert server.bodies[0]["model"] == "tiny"


def test_a_row_that_was_rejected_is_an_arrival(tmp_path: Path) -> None:
    trace = [TraceRequest("r0", 0.0, 9, 3), TraceRequest("r1", 0.5, 9, 0, status=429),
             TraceRequest("r2", 1.0, 9, 0, status=500)]  # fmt: skip
    summary, server = run_one(tmp_path / "run", trace)
    assert (summary.values["requests"], summary.values["completed"]) == (3, 3)
    assert [body["max_tokens"] for body in server.bodies] == [3, 1, 1]


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("acme: sk-1\nblue: 'sk-2'\n")
    assert read_keys(path) == {"acme": "sk-1", "blue": "sk-2"}
    for wrong, says in (
        ("[]", "holds no keys"),
        ("acme: 12", "of tenant 'acme' is no text"),
        ("a: [", "YAML"),
    ):
        path.write_text(wrong)
        with pytest.raises(InputError, match=says):
            read_keys(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_run_json_keeps_no_keys(tmp_path: Path) -> None:
    run_one(tmp_path / "run", rows(1, tenant="acme"), keys={"acme": "sk-secret"})
    for file in (tmp_path / "run").iterdir():
        assert b"sk-secret" not in file.read_bytes()
    assert orjson.loads((tmp_path / "run" / "run.json").read_bytes())["turns"] == "trace"


def test_answers_are_kept_if_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_one(out, rows(3), keep_answers=True)
    kept = [orjson.loads(line) for line in (out / "answers.jsonl").read_bytes().splitlines()]
    assert sorted(kept, key=lambda one: one["id"]) == [
        {"id": f"r{at}", "answer": " abc" * 4} for at in range(3)
    ]
    run_one(out, rows(3), force=True)
    assert not (out / "answers.jsonl").exists()  # they would be those of another run


def test_answers_in_one_piece_are_kept_and_failed_ones_are_not(tmp_path: Path) -> None:
    async def sometimes(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        if len(server.bodies) == 1:
            return web.Response(status=500)
        return await in_one_piece(server, request, body)

    out = tmp_path / "run"
    run_one(out, rows(2, stream=False), Server(sometimes), keep_answers=True)
    assert (out / "answers.jsonl").read_bytes() == b'{"id":"r1","answer":"yes"}\n'
