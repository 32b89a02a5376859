"""`/status?request=` and `forebay explain`, over sockets."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_processes import proxy_process
from proxy_stage import Call, RawBackend, Stage, by_request, stage

from forebay.proxy.cli import main
from forebay.replay.sim.clock import run
from forebay.traces.jsonl import write_trace
from forebay.traces.schema import TraceRequest

CANARY = "what the user asked and nobody else may read"
STREAM = {"prompt": CANARY, "stream": True, "max_tokens": 3}


async def status(on: Stage, query: str) -> tuple[int, Any]:
    async with on.client.get(f"{on.proxy.admin_url}/status{query}") as response:
        assert response.content_type == "application/json"
        text = await response.text()
        assert CANARY not in text
        return response.status, json.loads(text)


async def post(on: Stage, name: str, body: object = STREAM, **headers: str) -> int:
    async with on.post(body, headers={"x-request-id": name, **headers}) as response:
        await response.read()
        assert response.headers["x-request-id"] == name
        return int(response.status)


def test_a_stream_from_arrival_to_its_usage() -> None:
    async def main() -> None:
        async with RawBackend().running() as backend, stage([backend.url]) as on:
            assert await post(on, "one") == 200
            code, told = await status(on, "?request=one")
            assert code == 200
            assert told["request"].startswith("one/")
            assert told["state"] == "ended"
            assert told["verdict"].startswith("Sent at once to b0. First token after")
            assert [step["event"] for step in told["timeline"]] == ["sent", "first_token", "ended"]
            assert told["candidates"][0]["backend"] == "b0"
            actual = told["actual"]
            assert (actual["cached_tokens"], actual["prompt_tokens"]) == (4, 7)
            assert (actual["output_tokens"], actual["status"]) == (3, 200)
            # The whole id finds it too, and the latest of several comes first.
            assert (await status(on, f"?request={told['request']}"))[0] == 200
            await post(on, "one", {"prompt": "again", "max_tokens": 3})
            code, again = await status(on, "?request=one")
            assert again["same_id"] == [told["request"]]
            assert not again["streams"]
            text = on.proxy.metrics.text().decode()
            assert 'forebay_admitted_total{bucket="chat",outcome="met"} 1.0' in text
            assert 'forebay_admitted_total{bucket="chat",outcome="not_streamed"} 1.0' in text
            assert 'forebay_ttft_error_seconds_count{bucket="chat",side="' in text

    run(main())


@pytest.mark.parametrize(
    "query", ["?request=nobody", "?request=", "?request=%00%ff", "?request=a;b"]
)
def test_nobody_of_that_name(query: str) -> None:
    async def main() -> None:
        async with stage(["http://127.0.0.1:9"], wait_up=0, metrics={"receipts": 7}) as on:
            code, told = await status(on, query)
            assert code == 404
            error = told["error"]
            assert (error["code"], error["param"]) == ("unknown_request", "request")
            assert set(error) == {"message", "type", "param", "code"}
            assert "the last 7 " in error["message"]
            assert (await status(on, "?requests=x"))[1]["ready"] is False

    run(main())


def test_refused_with_the_rule_and_the_figures_then_judged() -> None:
    release = asyncio.Event()

    async def slowly(call: Call) -> None:
        await release.wait()
        await by_request(call)

    async def main() -> None:
        async with RawBackend(slowly).running() as backend, stage([backend.url]) as on:
            long = {**STREAM, "prompt": "x" * 400_000}
            first = asyncio.create_task(post(on, "first", long))
            await asyncio.sleep(0.1)
            assert await post(on, "hasty", long, **{"x-request-timeout": "1"}) == 429
            code, told = await status(on, "?request=hasty")
            assert (code, told["state"], told["decision"]["rule"]) == (200, "refused", "timeout")
            assert told["decision"]["limit"] == 1.0 < told["decision"]["value"]
            assert "the client waits 1.00 s" in told["verdict"]
            assert told["actual"]["status"] == 429
            assert told["actual"]["error"] == "deadline_unattainable"
            assert told["hindsight"] == "pending"
            await asyncio.sleep(2.0)
            text = on.proxy.metrics.text().decode()
            right = 'forebay_refusals_in_hindsight_total{bucket="document",verdict="right"} 1.0'
            assert right in text
            assert (await status(on, "?request=hasty"))[1]["hindsight"] == "right"
            release.set()
            assert await first == 200

    run(main())


def test_what_the_first_backend_did_and_where_it_went_then() -> None:
    async def reset(call: Call) -> None:
        call.reset()

    async def main() -> None:
        async with (
            RawBackend(reset).running() as bad,
            RawBackend().running() as good,
            stage([bad.url, good.url]) as on,
        ):
            assert await post(on, "one") == 200
            _, told = await status(on, "?request=one")
            ways = [(step["event"], step["backend"]) for step in told["timeline"]]
            assert [way for way in ways if way[0] != "queued"] == [
                ("sent", "b0"), ("failed", "b0"), ("sent", "b1"),
                ("first_token", "b1"), ("ended", "b1"),
            ]  # fmt: skip
            assert told["actual"]["tries"] == 2
            assert "b0 had failed" in told["verdict"]

    run(main())


def test_a_client_that_left() -> None:
    async def silent(call: Call) -> None:
        await call.hung_up()

    async def main() -> None:
        async with RawBackend(silent).running() as backend, stage([backend.url]) as on:
            task = asyncio.create_task(post(on, "gone"))
            await asyncio.sleep(0.2)
            assert (await status(on, "?request=gone"))[1]["state"] == "prefilling"
            task.cancel()
            await asyncio.sleep(0.2)
            _, told = await status(on, "?request=gone")
            assert (told["state"], told["actual"]["status"]) == ("ended", 499)
            assert told["verdict"].endswith("The client left first.")
            text = on.proxy.metrics.text().decode()
            assert 'forebay_admitted_total{bucket="chat",outcome="unanswered"} 1.0' in text

    run(main())


async def command(*words: str) -> tuple[int, str, str]:
    """`forebay explain` in a process of its own."""
    import sys

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forebay.proxy", "explain", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="no SO_REUSEPORT here")
def test_the_command_asks_the_worker_that_had_it() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            backend = await stack.enter_async_context(RawBackend().running())
            words = ("--workers", "2", "--backend", backend.url)
            _, url, admin = await stack.enter_async_context(proxy_process(*words))
            connector = aiohttp.TCPConnector(force_close=True)
            client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            for number in range(4):
                code = 503
                while code == 503:  # until that worker has asked the backend how it is
                    headers = {"x-request-id": f"r{number}"}
                    post = client.post(f"{url}/v1/completions", json=STREAM, headers=headers)
                    async with post as response:
                        code = response.status
                        await response.read()
                assert code == 200

            async def explained(*words: str) -> str:
                """Once the worker that had it answers in time."""
                while (found := await command(*words, "--admin", admin))[0]:
                    assert found[0] == 2
                return found[1]

            out = await explained("r0", "--json")
            told = json.loads(out)
            assert told["request"].startswith("r0/")
            assert told["worker"] in (0, 1)
            out = await explained("r3")
            lines = out.splitlines()
            assert lines[0].startswith("Sent at once to gpu0.")
            assert any("predicted" in line and "actual" in line for line in lines)
            assert CANARY not in out
            for name, at, words_ in (
                ("nobody", admin, "No request 'nobody' is remembered"),
                ("r0", url, "is it the admin port"),
                ("r0", "http://127.0.0.1:9", "is it the admin port"),
                ("r0", "127.0.0.1:9090", "give a URL"),
            ):
                code, out, error = await command(name, "--admin", at)
                assert (code, out) == (2, "")
                assert words_ in error
                assert len(error.strip().splitlines()) == 1

    asyncio.run(main())


def test_simulate_explains_one_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    blocks = tuple(range(196))
    rows = [
        TraceRequest("cold", 0.0, 100_000, 10, blocks),
        TraceRequest("warm", 60.0, 100_000, 10, blocks),
    ]
    write_trace(str(path), rows)
    assert main(["simulate", str(path), "--explain", "warm", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["actual"]["backend"] == "gpu0"
    assert told["predicted"]["cached_tokens"] > 90_000 < told["actual"]["cached_tokens"]
    assert main(["simulate", str(path), "--explain", "cold"]) == 0
    assert "Sent at once to gpu0" in capsys.readouterr().out
    assert main(["simulate", str(path), "--explain", "x"]) == 2
    assert "--explain x: no such request" in capsys.readouterr().err
    assert main(["simulate", str(path), "--explain", "x", "--sweep", "gpus=1,2"]) == 2
    assert "leave out --sweep" in capsys.readouterr().err
