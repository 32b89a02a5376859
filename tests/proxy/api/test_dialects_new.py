"""An API is one file and one line of the table of paths: no other part of the proxy knows it."""

import re
from typing import Any

import orjson
import pytest
from fakes.faulty_backends import answers, streams
from paths import ROOT
from stages.proxy_stage import STREAM_HEAD, Call, chunk, cut_off, on_stage

from forebay.proxy.api.dialects import DIALECTS, Dialect


class Conversation(Dialect):
    """A made-up API: turns in place of messages, a limit and a last event of its own."""

    path = "/v1/conversations"
    prompt_field = "turns"
    operation = "conversation"
    limits = ("most_tokens",)
    opens = frozenset(("opened",))
    ends = frozenset(("closed",))
    types_errors = True

    def sequences(self, fields: dict[str, Any]) -> int:
        return len(fields.get("voices", "1"))

    def usage_tokens(self, usage: object) -> tuple[int, int | None, int]:
        assert isinstance(usage, dict)
        return usage["read"], usage["known"], usage["output_tokens"]


def event(kind: str, **fields: Any) -> bytes:
    return b"data: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


USAGE = {"read": 70, "known": 40, "output_tokens": 3}
OPENING, MIDDLE = event("opened"), event("said", text="closed") + event("said", text="more")
END = event("closed", usage=USAGE)
BODY = {"turns": [{"role": "user", "content": "hello"}], "most_tokens": 5, "voices": "ab"}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIALECTS, Conversation.path, Conversation())


class TestNewEndpoint:
    async def test_a_stream_is_shaped_relayed_and_counted(self) -> None:
        sent: list[Any] = []

        async def serve(call: Call) -> None:
            assert call.head.startswith("POST /v1/conversations ")
            (backend,) = sent[0].backends.values()
            sent.extend(backend.in_flight.values())
            await call.send(STREAM_HEAD + chunk(OPENING) + chunk(MIDDLE) + chunk(END))
            await call.send(b"0\r\n\r\n")

        async with on_stage(serve) as (on, _):
            sent.append(on.proxy.driver.shaper)
            async with on.post({**BODY, "stream": True}, Conversation.path) as response:
                assert await response.read() == OPENING + MIDDLE + END
                assert "x-forebay-queue-ms" in response.headers
                assert response.headers["x-forebay-bucket"] == "chat"
            request = sent[1].request
            assert (request.sequences, request.output_tokens) == (2, 10)
            text = on.proxy.metrics.text().decode()
            assert 'forebay_prompt_tokens_total{backend="b0"} 70.0' in text
            assert 'forebay_cached_tokens_total{backend="b0"} 40.0' in text

    async def test_an_end_without_its_last_event_is_a_cut(self) -> None:
        async with on_stage(streams(OPENING, MIDDLE)) as (on, _):
            async with on.post({**BODY, "stream": True}, Conversation.path) as response:
                got = await cut_off(response)
            assert got.startswith(OPENING + MIDDLE + b"event: error\ndata: ")

    async def test_errors_and_methods(self) -> None:
        serve = answers(200, b'{"usage": {"read": 7, "known": 0, "output_tokens": 1}}')

        async with on_stage(serve, buckets=[{"name": "chat", "up_to": 5000}]) as (on, _):
            async with on.client.get(on.url + Conversation.path) as response:
                assert (response.status, response.headers["allow"]) == (405, "POST, OPTIONS")
            async with on.post({"turns": []}, Conversation.path) as response:
                assert response.status == 400
                error = await response.json()
                assert (error["type"], error["error"]["param"]) == ("error", "turns")
            assert await on.status(BODY, Conversation.path) == 200
            long = [{"role": "user", "content": "word " * 80_000}]
            async with on.post({"turns": long}, Conversation.path) as response:
                error = (await response.json())["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", "turns")


def test_relay_and_app_name_no_dialect() -> None:
    names = re.compile(r"\b(CHAT|COMPLETIONS|RESPONSES|MESSAGES)\b|\"/v1/(chat|comp|resp|mess)")
    for path in (*sorted((ROOT / "proxy" / "relay").glob("*.py")), ROOT / "proxy" / "app.py"):
        assert not names.search(path.read_text()), path
