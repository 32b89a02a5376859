"""An answer written at once is, byte for byte, what aiohttp would have sent."""

import asyncio
from unittest.mock import Mock

import pytest
from aiohttp import ClientConnectionError, HttpVersion, HttpVersion10, HttpVersion11, web
from aiohttp.http_writer import StreamWriter
from aiohttp.test_utils import make_mocked_request

from forebay.proxy import whole_answer

HEADERS = {"x-request-id": "r", "Server": "forebay", "Date": "today"}
BODY = b'{"choices":[]}'


def protocol(closing: bool = False) -> Mock:
    transport = Mock(spec=asyncio.Transport)
    transport.is_closing.return_value = closing
    return Mock(transport=transport, _paused=False)


def request(wire: Mock, method: str, version: HttpVersion, sent: dict[str, str]) -> web.BaseRequest:
    writer = StreamWriter(wire, asyncio.get_running_loop())
    return make_mocked_request(method, "/", sent, version=version, writer=writer)


async def sent_by_both(
    method: str, version: HttpVersion, sent: dict[str, str], close: bool, **answer: object
) -> tuple[list[bytes], list[bool | None]]:
    wrote, kept = [], []
    for ours in (True, False):
        wire = protocol()
        asked = request(wire, method, version, sent)
        response = web.Response(**answer)  # type: ignore[arg-type]
        if close:
            response.force_close()
        if ours:
            await whole_answer.send(asked, response)
        # aiohttp finishes every answer: what was sent is not sent again.
        await response.prepare(asked)
        await response.write_eof()
        wrote.append(b"".join(call.args[0] for call in wire.transport.write.call_args_list))
        kept.append(response.keep_alive)
        assert response.prepared
        assert asked.writer.output_size == len(wrote[-1])
    return wrote, kept


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("version", [HttpVersion10, HttpVersion11])
@pytest.mark.parametrize("method", ["POST", "GET", "HEAD"])
@pytest.mark.parametrize(
    "answer",
    [
        {"body": BODY, "headers": HEADERS | {"content-type": "application/json"}},
        {"body": BODY, "headers": HEADERS},
        {"body": BODY, "headers": HEADERS | {"Connection": "close"}},
        {"body": BODY, "headers": HEADERS, "reason": "Fine"},
        {"body": BODY, "headers": HEADERS, "status": 503},
        {"body": b"", "headers": HEADERS},
        {"headers": HEADERS, "status": 204},
    ],
)
def test_the_bytes_are_aiohttps(
    answer: dict[str, object], method: str, version: HttpVersion, connection: str, close: bool
) -> None:
    asked = {"connection": connection}
    wrote, kept = asyncio.run(sent_by_both(method, version, asked, close, **answer))
    assert wrote[0] == wrote[1] != b""
    assert kept[0] == kept[1]


def test_a_header_cannot_end_the_head() -> None:
    async def split() -> None:
        response = web.Response(body=BODY, headers={"x-id": "a\r\nset-cookie: b"})
        await whole_answer.send(request(protocol(), "POST", HttpVersion11, {}), response)

    with pytest.raises(ValueError, match="header"):
        asyncio.run(split())


def test_a_client_that_has_gone_is_told() -> None:
    async def gone() -> None:
        asked = request(protocol(closing=True), "POST", HttpVersion11, {})
        await whole_answer.send(asked, web.Response(body=BODY))

    with pytest.raises(ClientConnectionError):
        asyncio.run(gone())
