"""No prompt, key, query or header of a client turns up in logs, metrics, status or errors."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.faulty_backends import answers, resets, sends, streams
from stages.proxy_stage import EVENT, Call, RawBackend, Stage, by_request, settle, stage

from forebay.proxy.config.sections import Tracing
from forebay.proxy.telemetry.logs.access_log import LOGGER, ConsoleLines, JsonLines
from forebay.proxy.telemetry.logs.tracing import Tracer

CANARY = "zz9-plural-z-alpha"
HEADERS = {
    "x-canary": CANARY,
    "cookie": f"a={CANARY}",
    "traceparent": CANARY,
    "x-request-timeout": CANARY,
    "x-forebay-class": CANARY,
    "content-encoding": CANARY,
    "transfer-encoding": CANARY,
    "expect": CANARY,
    "x-request-id": CANARY + "!",
    "content-type": CANARY,
    "host": CANARY,
}
BODIES: list[Any] = [
    {"prompt": CANARY, "stream": True},
    {"prompt": CANARY},
    {"prompt": [CANARY, 1]},
    {"prompt": {CANARY: CANARY}},
    {"messages": [CANARY]},
    {"messages": [{"role": CANARY, "content": {CANARY: 1}}]},
    {"prompt": "x", "stream": CANARY},
    {"prompt": "x", "priority": CANARY},
    {"prompt": "x", "cache_salt": [CANARY]},
    {"prompt": CANARY, "cache_salt": CANARY, "model": CANARY, "user": CANARY},
    {"prompt": "x", "max_tokens": CANARY},
    {"prompt": CANARY * 40_000},
    [CANARY],
    b'{"prompt": "' + CANARY.encode(),
    CANARY.encode() + b"\xff",
]
RAW = [
    f"GET /{CANARY} HTTP/1.1\r\nhost: x\r\nbad header {CANARY}\r\n\r\n",
    f"{CANARY} / HTTP/1.1\r\nhost: x\r\n\r\n",
    f"GET /{CANARY}\r\n\r\n",
    f"GET /v1/models HTTP/{CANARY}\r\n\r\n",
    f"GET /v1/models?q={CANARY} HTTP/1.1\r\nhost: x\r\nx: {CANARY * 2000}\r\n\r\n",
    f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {CANARY}\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer good-key-of-tests\r\n"
    f"transfer-encoding: chunked\r\n\r\n{CANARY}\r\n",
    f"CONNECT {CANARY}:443 HTTP/1.1\r\nhost: x\r\n\r\n",
]
KEY = "good-key-of-tests"


cut = streams(EVENT, end="reset")


garbage = sends(f"HTTP/1.1 {CANARY}\r\n{CANARY}\r\n\r\n".encode(), end="keep")


busy = answers(503, b"{}")


async def fails(*_: object) -> None:
    raise LookupError(CANARY)  # as of a fault of ours that quotes what it stumbled over


SERVES: list[Callable[[Call], Awaitable[None]]] = [by_request, cut, garbage, resets, busy]


def traced() -> tuple[Tracer | None, Callable[[], str]]:
    """A tracer, if its packages are installed, and what it has sent off."""
    if find_spec("opentelemetry.sdk") is None:
        return None, str
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer(Tracing(enabled=True), exporter)
    return tracer, lambda: "".join(span.to_json() for span in exporter.get_finished_spans())


@pytest.mark.parametrize("tenants", [{"keys": "env:KEYS"}, {}])
async def test_a_canary_is_seen_nowhere(
    tenants: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("KEYS", f"acme: {KEY}, bolt: {CANARY}-key")
    monkeypatch.setenv("FOREBAY_CAPTURE_SALT", f"{CANARY}{CANARY}")
    capture = tmp_path / "traffic.jsonl"
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, LOGGER.name)  # every request has its line
    monkeypatch.setattr(LOGGER, "propagate", True)
    tracer, spans = traced()
    public: list[str] = []
    statuses: set[int] = set()

    async def keep(response: aiohttp.ClientResponse) -> None:
        statuses.add(response.status)
        try:
            body = (await response.read()).decode()
        except aiohttp.ClientPayloadError:
            body = ""
        public.append(f"{response.status} {response.reason} {dict(response.headers)} {body}")

    async def ask(on: Stage, path: str, body: Any, headers: dict[str, str]) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            async with on.client.post(on.url + path, data=data, headers=headers) as response:
                await keep(response)
        except (aiohttp.ClientError, ValueError):
            pass  # a header that no client sends

    async with (
        RawBackend().running() as first,
        RawBackend().running() as second,
        stage(
            [first.url, second.url],
            tenants=tenants,
            limits={"body": 400_000},
            tracer=tracer,
            capture={"path": str(capture)},
        ) as on,
    ):
        keys = [KEY, f"{CANARY}-key", CANARY]
        for serve in SERVES:
            first.serve = second.serve = serve
            for path, key, body in product(
                ("/v1/completions", "/v1/chat/completions", f"/v1/completions?q={CANARY}",
                 f"/v1/embeddings?q={CANARY}", f"/{CANARY}"), keys, BODIES,
            ):  # fmt: skip
                await ask(on, path, body, {"authorization": f"Bearer {key}"})
            for name, value in HEADERS.items():
                for key in keys:
                    headers = {"authorization": f"Bearer {key}", name: value}
                    await ask(on, "/v1/completions", BODIES[0], headers)
            for raw in RAW:
                host, port = on.url.removeprefix("http://").split(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(raw.encode())
                writer.write_eof()
                public.append((await reader.read()).decode())
                writer.close()
        await asyncio.sleep(5)  # backends that had failed are up again; probes have been said
        first.serve = second.serve = by_request
        with monkeypatch.context() as broken:
            broken.setattr(on.proxy.app._relay, "serve", fails)
            await ask(on, "/v1/completions", BODIES[0], {"authorization": f"Bearer {KEY}"})
        for page in ("/metrics", "/status", "/"):
            async with on.client.get(on.proxy.admin_url + page) as response:
                public.append(await response.text())
        public.extend(on.said)
        await settle()
        on.assert_nothing_held()
    assert {200, 400, 404, 413, 500, 502} <= statuses
    assert (401 in statuses) is bool(tenants)
    told = "\n".join(public)
    assert "forebay_responses_total" in told
    captured = capfd.readouterr()
    formats = (logging.Formatter(), JsonLines(), ConsoleLines())  # the first with tracebacks
    logged = "\n".join(form.format(line) for form in formats for line in caplog.records)
    assert '"message":"request"' in logged
    assert ('"tenant":"acme"' in logged) is bool(tenants)
    sent_off = spans()
    assert (tracer is None) or "text_completion" in sent_off
    taken = capture.read_text()
    assert ('"tenant":"t-' in taken) is bool(tenants)
    assert "acme" not in taken
    for where in (told, captured.out, captured.err, logged, sent_off, taken):
        for secret in (CANARY, KEY):
            at = where.find(secret)
            assert at < 0, where[max(0, at - 200) : at + 100]
