"""Outcomes of requests to a misbehaving target; no fault may flatter the figures."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from stages.replay_server import (
    DONE,
    Behaviour,
    Server,
    answer,
    event,
    rows,
    run_one,
    serve,
    stream,
    table,
    text,
    usage,
)
from yarl import URL

from forebay.replay.clock.clock import Clock
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.results.folder import HLOG, RUN
from forebay.replay.runner import replay
from forebay.replay.send.http.client import Client
from forebay.replay.send.http.exchange import ClientExchange
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import read_hlog

Body = dict[str, Any]


def error(status: int, code: object, **headers: str) -> Behaviour:
    async def behave(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
        shaped = {"error": {"message": "m", "type": "t", "param": None, "code": code}}
        return web.json_response(shaped, status=status, headers=headers)

    return behave


def streams(*pieces: bytes, **headers: str) -> Behaviour:
    """Write the pieces 10 ms apart and end the stream cleanly."""

    async def behave(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
        response = await stream(request, **headers)
        for piece in pieces:
            await asyncio.sleep(0.01)
            await response.write(piece)
        return response

    return behave


async def dies(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def dies_within(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
    response = await stream(request)
    await response.write(text(" abc"))
    await asyncio.sleep(0.01)
    return await dies(server, request, body)


async def dies_after_done(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
    response = await stream(request)
    await response.write(text(" abc") + DONE)
    await asyncio.sleep(0.01)
    return await dies(server, request, body)


async def never_answers(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
    await asyncio.sleep(1000)
    return web.Response()


async def stalls(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
    response = await stream(request)
    await response.write(text(" abc"))
    for _ in range(100):  # comments keep the connection warm and are no output
        await response.write(b": ping\n\n")
        await asyncio.sleep(10)
    return response


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (error(429, 429), "429"),
        (error(502, "upstream_error"), "5xx"),
        (error(200, None), "malformed"),  # JSON where a stream was asked for
        (error(302, None, location="http://127.0.0.1/"), "malformed"),  # never followed
        (dies, "connect"),
        (dies_within, "truncated"),
        (streams(text(" abc"), text(" abc")), "truncated"),  # ends cleanly, without [DONE]
        (streams(text(" abc"), text(" abc", "abort"), usage(8, 2), DONE), "truncated"),
        (streams(text(" abc"), DONE[:-3]), "truncated"),
        (streams(text(" abc"), b"data: {oops\n\n"), "malformed"),
        (streams(text(" abc"), b"data: [1]\n\n"), "malformed"),
        (
            streams(text(" abc"), event({"error": {"code": 500, "message": "m"}}), DONE),
            "stream_error",
        ),
        (streams(event({"error": {"code": "upstream_stream_error"}})), "stream_error"),
        (streams(event({"error": {"code": 400}}), DONE), "4xx"),
        (never_answers, "timeout"),
        (streams(ROLE), "truncated"),
        (stalls, "stall"),
    ],
)
def test_failures_by_class(tmp_path: Path, behaviour: Behaviour, reason: str) -> None:
    summary, _ = run_one(tmp_path / "run", rows(20), Server(behaviour))
    told = summary.values
    assert told["failed"] == {reason: 20}
    assert (told["completed"], told["rejected"], told["attainment"]) == (0, {}, 0.0)
    assert told["ttft_ms"]["all"]["count"] == 0  # a failure is not fast
    assert told["ttft_ms_failures_as_inf"]["all"] == {
        **dict.fromkeys(("p50", "p90", "p95", "p99", "p99.9", "max"), "inf"),
        "count": 20,
    }
    assert {row["outcome"] for row in table(summary.folder)} == {"failed"}


def test_timeouts_are_as_long_as_was_asked(tmp_path: Path) -> None:
    for behaviour, duration_s in ((never_answers, 30.0), (stalls, 7.0)):
        summary, _ = run_one(
            tmp_path / behaviour.__name__,
            rows(1),
            Server(behaviour),
            first_token_timeout_s=30.0,
            stall_timeout_s=7.0,
        )
        assert summary.values["duration_s"] == pytest.approx(duration_s, abs=0.01)


def test_a_connection_that_breaks_after_done_was_answered(tmp_path: Path) -> None:
    summary, _ = run_one(tmp_path / "run", rows(3), Server(dies_after_done))
    assert summary.values["completed"] == 3


def test_rejects_are_apart_from_failures(tmp_path: Path) -> None:
    behaviour = error(429, "queue_full", **{"retry-after": "3", "retry-after-ms": "2500"})
    summary, _ = run_one(tmp_path / "run", rows(20), Server(behaviour))
    told = summary.values
    assert (told["rejected"], told["failed"], told["attainment"]) == ({"queue_full": 20}, {}, 0.0)
    assert told["reject_ms"]["count"] == told["reject_ms"]["with_retry_after"] == 20
    assert told["reject_ms"]["p50"] < 1
    row = table(summary.folder)[0]
    assert (row["outcome"], row["reason"], row["status"]) == ("rejected", "queue_full", 429)
    assert row["retry_after_s"] == 2.5
    assert row["reject_latency_s"] >= 0


def test_failures_as_infinite_hide_no_percentile_below_them(tmp_path: Path) -> None:
    """One in four of 200 requests fails: p50 is a time, p90 is infinite, and both are reported."""

    async def sometimes(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
        if len(server.bodies) % 4 == 0:
            return await error(500, None)(server, request, body)
        return await answer(server, request, body)

    summary, _ = run_one(tmp_path / "run", rows(200), Server(sometimes))
    told = summary.values
    assert told["failed"] == {"5xx": 50}
    assert told["attainment"] == pytest.approx(0.75)
    assert told["ttft_ms"]["chat"]["p90"] == pytest.approx(10, rel=0.01)
    infinite = told["ttft_ms_failures_as_inf"]["chat"]
    assert infinite["p50"] == pytest.approx(10, rel=0.01)
    assert infinite["p90"] == infinite["max"] == "inf"
    assert infinite["count"] == 200


def test_role_and_empty_events_are_no_first_token(tmp_path: Path) -> None:
    chat = event({"choices": [{"index": 0, "delta": {"content": "hi"}}]})
    behaviour = streams(ROLE, text(""), chat, chat, usage(8, 2), DONE)
    summary, _ = run_one(tmp_path / "run", rows(1), Server(behaviour), endpoint="chat")
    (row,) = table(summary.folder)
    assert row["ttft_response_s"] == pytest.approx(0.030)
    assert row["tpot_s"] == pytest.approx(0.010)


def test_reasoning_and_tool_calls_are_output(tmp_path: Path) -> None:
    for name, delta in (
        ("reasoning", {"reasoning_content": "hm"}),
        ("tool", {"tool_calls": [{"index": 0}]}),
    ):
        thought = event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        server = Server(streams(ROLE, thought, usage(8, 1), DONE))
        summary, _ = run_one(tmp_path / name, rows(1), server, endpoint="chat")
        assert table(summary.folder)[0]["ttft_response_s"] == pytest.approx(0.020)


def test_continuous_usage_gives_the_tokens_of_an_event(tmp_path: Path) -> None:
    def counted(total: int) -> bytes:
        return text(" abc", usage={"prompt_tokens": 8, "completion_tokens": total})

    behaviour = streams(counted(2), counted(6), usage(8, 6, 0), DONE)
    summary, _ = run_one(tmp_path / "run", rows(1), Server(behaviour))
    (row,) = table(summary.folder)
    assert row["tpot_s"] == pytest.approx(0.010 / 4)
    assert row["tokens_estimated"] is False
    assert summary.values["itl_ms"]["all"]["count"] == 4
    assert summary.values["icl_ms"]["all"]["count"] == 1
    assert summary.values["hit_ratio"] == 0.0  # known to be nothing


def test_events_of_one_read_share_a_time(tmp_path: Path) -> None:
    behaviour = streams(text(" abc") * 3 + usage(8, 3) + DONE)
    summary, _ = run_one(tmp_path / "run", rows(1), Server(behaviour))
    (row,) = table(summary.folder)
    assert (row["first_s"], row["stall_s"], row["tpot_s"]) == (row["last_s"], 0.0, 0.0)


def test_an_answer_without_any_output_meets_no_target(tmp_path: Path) -> None:
    summary, _ = run_one(tmp_path / "run", rows(2), Server(streams(usage(8, 0), DONE)))
    told = summary.values
    assert (told["completed"], told["attainment"]) == (2, 0.0)
    assert told["completed_without_output"] == 2
    assert table(summary.folder)[0]["ttft_response_s"] is None


def test_the_proxys_headers_are_kept(tmp_path: Path) -> None:
    headers = {"x-forebay-backend": "gpu1", "x-forebay-queue-ms": "12.5"}
    behaviour = streams(text(" abc"), usage(100, 1, 5), DONE, **headers)
    summary, _ = run_one(tmp_path / "run", rows(20), Server(behaviour))
    assert summary.values["prompt_tokens_per_backend"] == {"gpu1": 2000}
    assert summary.values["queue_ms"]["chat"]["p50"] == pytest.approx(12.5, rel=2e-3)
    assert table(summary.folder)[0]["backend"] == "gpu1"
    assert table(summary.folder)[0]["cached_tokens"] == 5
    assert summary.values["hit_ratio"] == 0.05


def test_the_queue_wait_is_that_of_completed_requests(tmp_path: Path) -> None:
    """A rejected or failed request may have waited in the proxy's queue too; it does not count."""
    served = streams(text(" abc"), usage(8, 1), DONE, **{"x-forebay-queue-ms": "12"})
    broken = streams(text(" abc"), **{"x-forebay-queue-ms": "300"})
    refused = error(429, "deadline_unattainable", **{"x-forebay-queue-ms": "900"})

    async def in_turn(server: Server, request: web.Request, body: Body) -> web.StreamResponse:
        return await (served, refused, broken)[len(server.bodies) % 3](server, request, body)

    summary, _ = run_one(tmp_path / "run", rows(60), Server(in_turn))
    told = summary.values
    assert (told["completed"], told["failed"]) == (20, {"truncated": 20})
    assert told["rejected"] == {"deadline_unattainable": 20}
    assert told["queue_ms"]["chat"]["count"] == told["queue_ms"]["all"]["count"] == 20
    assert told["queue_ms"]["all"]["max"] == pytest.approx(12, rel=2e-3)
    logged = [one.histogram for one in read_hlog(summary.folder / HLOG)["queue_wait.chat"]]
    assert sum(one.total_count for one in logged) == 20
    ok = [row["queue_ms"] for row in table(summary.folder) if row["outcome"] == "ok"]
    assert ok == [12.0] * 20  # what compare calls the proxy queue
    assert (
        "completed"
        in orjson.loads((summary.folder / RUN).read_bytes())["definitions"]["queue_wait"]
    )


async def test_a_target_that_goes_away_in_the_middle(tmp_path: Path) -> None:
    """Refused connections are failures of the run, not the end of it."""

    async with serve() as server:
        asked = ReplayOptions(rows(40, gap_s=0.1), [server.url], tmp_path / "r", quiet=True)
        running = asyncio.create_task(replay(asked))
        await asyncio.sleep(2.03)
    told = (await running).values
    assert told["requests"] == 40
    assert told["completed"] == 21
    assert told["failed"] == {"connect": 19}


async def test_a_plain_server_behind_https(tmp_path: Path) -> None:
    """The wrong scheme is found before anything is sent; during a run it would be class tls."""
    async with serve() as server:
        url = server.url.replace("http://", "https://")
        asked = ReplayOptions(rows(2), [url], tmp_path / "r", quiet=True)
        with pytest.raises(InputError, match="cannot be reached"):
            await replay(asked)


async def test_tls_is_a_class_of_its_own() -> None:
    async with (
        serve() as server,
        Client(Clock(), first_token_timeout_s=5, stall_timeout_s=5) as client,
    ):
        exchange = ClientExchange("x", 0.0)
        url = URL(server.url.replace("http://", "https://"))
        await client.send(url, b"{}", exchange, client.watch())
    assert (exchange.outcome, exchange.reason, exchange.status) == ("failed", "tls", None)
