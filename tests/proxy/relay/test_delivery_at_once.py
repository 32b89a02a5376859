"""A response that is written in one step has the bytes of aiohttp's steps."""

import asyncio

import pytest
from aiohttp import web, web_response

from forebay.proxy.relay import delivery
from forebay.proxy.relay.timeouts import Watchdog
from forebay.traces.ground.event_loop import background

OURS = {"x-request-id": "a1", "Server": "forebay"}
RESPONSES = {
    "json": lambda: web.Response(body=b'{"a": 1}', headers=OURS, content_type="application/json"),
    "empty": lambda: web.Response(status=503, body=b"", headers=OURS),
    "bare": lambda: web.Response(body=b"text"),
    "not ASCII": lambda: web.Response(body=b"x", headers={"content-type": "text/é"}),
    "a tab": lambda: web.Response(body=b"x", headers={"content-type": "a\tb"}),
    "dated": lambda: web.Response(body=b"x", headers={"Date": "then"}),
    "twice": lambda: web.Response(body=b"x", headers=[("a", "1"), ("A", "2")]),
    "closed": lambda: web.Response(body=b"x", headers={"Connection": "close"}),
    "no content": lambda: web.Response(status=204),
    "no body": lambda: web.Response(status=404),
    "large": lambda: web.Response(body=b"x" * 100_000),
    "control character": lambda: web.Response(body=b"x", headers={"content-type": "a\x01"}),
}
REQUESTS = {
    "POST": b"POST / HTTP/1.1\r\nhost: x\r\n\r\n",
    "HEAD": b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n",
    "HTTP/1.0": b"POST / HTTP/1.0\r\nhost: x\r\n\r\n",
    "close": b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
}
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def answered(request: bytes, kind: str, *, force_close: bool) -> bytes:
    """Return what the server writes for a request and, unless it closes then, for a last one."""

    async def handle(incoming: web.BaseRequest) -> web.StreamResponse:
        if incoming.path == "/last":
            return web.Response(text="last")
        response = RESPONSES[kind]()
        if force_close:
            response.force_close()
        await delivery.send_whole(incoming, response, watchdog)
        return response

    watchdog = Watchdog(10.0, 10.0)
    async with background(watchdog.run()):
        loop = asyncio.get_running_loop()
        server = await loop.create_server(web.Server(handle, access_log=None), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(request + LAST)
            try:
                return await reader.read()
            finally:
                writer.close()


@pytest.mark.parametrize("kind", RESPONSES)
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=list(REQUESTS))
def test_a_single_step_writes_the_bytes_of_aiohttp(
    kind: str, request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (delivery, web_response):
        monkeypatch.setattr(module, "rfc822_formatted_time", lambda: "now")
    for force_close in (False, True):
        at_once = asyncio.run(answered(request_, kind, force_close=force_close))
        with monkeypatch.context() as patched:
            patched.setattr(delivery, "_sent_at_once", lambda *_: False)
            assert asyncio.run(answered(request_, kind, force_close=force_close)) == at_once


def test_a_small_answer_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(web.Response, "_start")  # aiohttp's steps
    monkeypatch.delattr(web.StreamResponse, "_start")
    answer = asyncio.run(answered(REQUESTS["POST"], "json", force_close=False))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\nx-request-id: a1\r\n")
