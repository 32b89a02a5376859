"""`/status?request=` and `forebay explain`, over sockets."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.faulty_backends import late, resets
from stages.proxy_processes import proxy_process
from stages.proxy_stage import Call, RawBackend, Stage, by_request, on_stage, silent, stage

from forebay.proxy.cli import main
from forebay.proxy.core.explain.receipt import Receipt
from forebay.proxy.core.model import Request
from forebay.proxy.diagnose.explain_cli import show_list
from forebay.proxy.diagnose.receipt_text import main_reason
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace

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


async def test_a_stream_from_arrival_to_its_usage() -> None:
    async with on_stage(None) as (on, _):
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


@pytest.mark.parametrize(
    "query", ["?request=nobody", "?request=", "?request=%00%ff", "?request=a;b"]
)
async def test_nobody_of_that_name(query: str) -> None:
    async with stage(["http://127.0.0.1:9"], wait_up=0, metrics={"receipts": 7}) as on:
        code, told = await status(on, query)
        assert code == 404
        error = told["error"]
        assert (error["code"], error["param"]) == ("unknown_request", "request")
        assert set(error) == {"message", "type", "param", "code"}
        assert "the last 7 " in error["message"]
        assert (await status(on, "?requests=x"))[0] == 400


async def test_refused_with_the_rule_and_the_figures_then_judged() -> None:
    release = asyncio.Event()

    async with on_stage(late(release, by_request)) as (on, _):
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


async def test_the_failure_at_the_first_backend_and_the_second_attempt() -> None:
    async with on_stage(resets, None) as (on, _):
        assert await post(on, "one") == 200
        _, told = await status(on, "?request=one")
        ways = [(step["event"], step["backend"]) for step in told["timeline"]]
        assert [way for way in ways if way[0] != "queued"] == [
            ("sent", "b0"), ("failed", "b0"), ("sent", "b1"),
            ("first_token", "b1"), ("ended", "b1"),
        ]  # fmt: skip
        assert told["actual"]["tries"] == 2
        assert "b0 had failed" in told["verdict"]


async def test_a_client_that_left() -> None:
    async with on_stage(silent) as (on, _):
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


async def get(on: Stage, target: str) -> tuple[int, Any]:
    async with on.client.get(on.proxy.admin_url + target) as response:
        text = await response.text()
        assert CANARY not in text
        return response.status, json.loads(text)


async def test_the_slowest_and_the_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    async def slowly(call: Call) -> None:
        if b'"stream"' in call.body:
            await asyncio.sleep(3.0 if b"slow" in call.body else 0.5)
        await by_request(call)

    buckets = [{"name": "chat", "up_to": 5_000}, {"name": "document", "up_to": 20_000}]
    async with on_stage(slowly, buckets=buckets) as (on, _):
        long = {**STREAM, "prompt": "x" * 40_000}
        assert await post(on, "quick") == 200
        assert await post(on, "slow", {**STREAM, "prompt": "slow"}) == 200
        await asyncio.sleep(100.0)
        assert await post(on, "document", long) == 200
        assert await post(on, "hidden", {"prompt": "no stream"}) == 200
        assert await post(on, "too-long", {**STREAM, "prompt": "x" * 400_000}) == 400
        code, found = await get(on, "/requests")
        assert code == 200
        names = [row["request"].partition("/")[0] for row in found["requests"]]
        assert names == ["slow", "quick", "document"]
        assert (found["considered"], found["unseen"]) == (5, 1)
        slow = found["requests"][0]
        assert slow["latency_s"] == slow["ttft_s"] == pytest.approx(3.0, abs=0.1)
        assert slow["reason"].startswith("b0 took 3.00 s; ")
        show_list(found)
        for query, expected in {
            "count=1": ["slow"],
            "bucket=document": ["document"],
            "since_s=50": ["document"],
            "by=rejected": ["too-long"],
            "by=rejected&bucket=chat": [],
        }.items():
            _, one = await get(on, f"/requests?{query}")
            assert [r["request"].partition("/")[0] for r in one["requests"]] == expected, query
        _, rejected = await get(on, "/requests?by=rejected")
        assert "the largest bucket allows 20,000" in rejected["requests"][0]["reason"]
        show_list(rejected)
        for query, words in {
            "by=fastest": "by: give slowest or rejected",
            "bucket=chats": "bucket: give one of chat, document",
            "count=0": "count: give 1 to 100",
            "count=many": "count: give 1 to 100",
            "since_s=-1": "since_s: give 0 or more",
            "since_s=nan": "since_s: give 0 or more",
        }.items():
            code, told = await get(on, f"/requests?{query}")
            assert (code, told["error"]["message"]) == (400, words)
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].split() == [
        "request",
        "ago",
        "bucket",
        "backend",
        "first",
        "token",
        "predicted",
    ]
    assert lines[1].split()[:4] == ["slow", "2", "min", "chat"]
    assert max(map(len, lines)) <= 80
    assert "1 were no streams" in said.err


def test_the_lists_name_tenants(capsys: pytest.CaptureFixture[str]) -> None:
    def row(tenant: str | None) -> dict[str, Any]:
        return {"request": "r/1", "age_s": 3.0, "bucket": "chat", "tenant": tenant, "reason": "x",
                "predicted_ttft_s": 0.2, "hindsight": None}  # fmt: skip

    show_list(
        {"by": "rejected", "considered": 300, "kept": 2_000, "unseen": 0,
         "by_tenant": {"acme": 96, "zeta": 4}, "requests": [row("acme"), row(None)],
         "findings": [
             {"severity": "warning", "text": "a is slow", "remedy": "look", "age_s": age_s}
             for age_s in (3.0, 90.0)]}
    )  # fmt: skip
    said = capsys.readouterr()
    assert said.out.splitlines()[-2:] == [
        "WARNING  a is slow. Remedy: look.",
        "WARNING  until 90 s ago: a is slow. Remedy: look.",
    ]
    assert said.out.splitlines()[0].split() == ["request", "ago", "bucket", "tenant", "predicted"]
    assert "acme" in said.out.splitlines()[1]
    assert "Rejected by tenant: acme 96 (96%), zeta 4 (4%)." in said.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"rule": "no_backend"}, "Rejected after 5.00 s in the queue: no backend that it"),
        ({"state": "left", "waits": {"slots": 2.0}}, "the client left because all slots of its"),
        ({"state": "ended", "status": 504, "reason": "late"}, "answered 504 (late), no first"),
        ({"state": "ended", "status": 499}, "the client left"),
        ({"state": "ended", "status": 200}, "not a stream: its first token is not visible"),
        ({"sent_at": 3.0, "first_token_at": 4.0, "waits": {"kv": 2.0, "turn": 1.0}},
         "waited 3.00 s: the KV cache had no room for it"),
        ({"sent_at": 0.0, "first_token_at": 4.0, "predicted_s": 1.0}, "b took 4.00 s; 1.00 s pred"),
        ({"sent_at": 0.0, "first_token_at": 1.1, "predicted_s": 1.0, "cached_tokens": 7},
         "its prompt of 100 tokens, 7 cached, as predicted"),
        ({"sent_at": 0.0, "first_token_at": 16.79, "predicted_s": 12.11, "cached_tokens": 0},
         "its prompt of 100 tokens, 0 cached, on b: 1.4 times as long as predicted"),
        ({"sent_at": 0.0, "first_token_at": 4.0, "predicted_s": 8.0},
         "its prompt of 100 tokens, on b: 0.5 times as long as predicted"),
        ({"sent_at": 0.0, "first_token_at": 0.04, "predicted_s": 0.01},
         "its prompt of 100 tokens, as predicted"),
        ({"sent_at": 4.0, "first_token_at": 4.1, "waits": {"turn": 3.9, "kv": 0.1}},
         "waited 4.00 s: it was behind earlier requests, and then the KV cache had no room"),
        ({"sent_at": 4.0, "first_token_at": 4.1, "waits": {"turn": 3.9, "kv": 0.0}},
         "waited 4.00 s: it was behind earlier requests"),
    ],
)  # fmt: skip
def test_the_main_reason(state: dict[str, Any], reason: str) -> None:
    receipt = Receipt(Request("r", 100), "chat", 0.0)
    receipt.state, receipt.backend, receipt.ended_at = "refused", "b", 5.0
    if "first_token_at" in state:
        receipt.state = "ended"
    for name, value in state.items():
        setattr(receipt, name, value)
    assert main_reason(receipt).startswith(reason)


async def test_a_dry_run_sends_nothing_and_leaves_no_trace() -> None:
    async with on_stage(late(20.0, by_request)) as (on, (backend,)):

        async def dry(body: object, query: str = "", **headers: str) -> tuple[int, Any]:
            data = BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
            url = f"{on.proxy.admin_url}/preview{query}"
            async with on.client.post(url, data=data, headers=headers) as response:
                text = await response.text()
                assert CANARY not in text
                return response.status, json.loads(text)

        before = on.proxy.metrics.text()
        code, told = await dry(STREAM)
        assert (code, told["accepted"], told["bucket"]) == (200, True, "chat")
        assert told["verdict"].startswith("Would be sent at once to b0. First token predicted")
        assert [candidate["backend"] for candidate in told["candidates"]] == ["b0"]
        chat = {"messages": [{"role": "user", "content": "x" * 400_000}]}
        assert (await dry(chat))[1]["bucket"] == "document"
        assert not backend.calls
        on.assert_nothing_held()
        told_now = {line for line in on.proxy.metrics.text().splitlines() if b"forebay" in line}
        changed = told_now - set(before.splitlines())
        untouched = (b"event_loop_lag", b"connections")
        assert not [line for line in changed if not any(name in line for name in untouched)]

        sent = asyncio.create_task(post(on, "first", {**STREAM, "prompt": "x" * 400_000}))
        await asyncio.sleep(1.0)
        hasty = {"x-request-timeout": "1"}
        _, told = await dry({**STREAM, "prompt": "y" * 400_000}, **hasty)
        assert not told["accepted"]
        assert told["verdict"].startswith("Would be rejected at once: first token predicted")
        assert told["decision"]["rule"] == "timeout"
        _, told = await dry({**STREAM, "prompt": "y" * 400_000})
        assert told["accepted"]
        assert told["verdict"].startswith("Would wait for b0, because")
        assert (await status(on, "?request=preview"))[0] == 404

        for body, code, error in (
            (b"nonsense", 400, "invalid_json"),
            ([], 400, "invalid_type"),
            ({"messages": 1}, 400, "invalid_type"),
            (b" " * (17 << 20), 413, "request_too_large"),
        ):
            found, told = await dry(body)
            assert (found, told["error"]["code"]) == (code, error)
        found, told = await dry(STREAM, origin="https://elsewhere.example")
        assert (found, told["error"]["code"]) == (403, "cross_site")
        assert on.proxy.app._budget.held == len(json.dumps(STREAM)) - len(CANARY) + 400_000
        on.proxy.protection.shed = 3
        assert "sheds requests of class standard" in (await dry(STREAM))[1]["verdict"]
        on.proxy.app.draining = True
        _, told = await dry(STREAM)
        assert (told["accepted"], told["verdict"]) == (
            False,
            "Would be rejected: the proxy is stopping.",
        )
        on.proxy.app.draining = False
        assert await sent == 200


async def command(*words: str, word: str = "explain") -> tuple[int, str, str]:
    """A command in a process of its own."""
    import sys

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forebay.proxy", word, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="no SO_REUSEPORT here")
@pytest.mark.real_time
async def test_the_command_asks_the_worker_that_had_it(tmp_path: Path) -> None:
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
        found = json.loads(await explained("--slowest", "3", "--json"))
        assert len(found["requests"]) == 3
        assert all(row["worker"] in (0, 1) for row in found["requests"])
        assert "0 rejected requests, of 4" in (await command("--rejected", "--admin", admin))[2]
        body = tmp_path / "body.json"
        body.write_text(json.dumps(STREAM))
        assert json.loads(await explained("--dry-run", str(body), "--json"))["accepted"]
        assert "Would be sent at once to gpu0" in await explained("--dry-run", str(body))
        body.write_text("nonsense")
        code, _, error = await command("--dry-run", str(body), "--admin", admin)
        assert (code, "The body is not valid JSON (line 1" in error) == (2, True)
        code, out, error = await command("--admin", admin, word="doctor")
        assert (code, "Checked 1 backend with" in error) == (1, True)
        # A busy machine has findings of its own.
        assert "WARNING  gpu0 does not list its models." in out
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
