"""A request's framing, and its faults."""

from collections.abc import Callable

from stages.proxy_stage import chunk
from stages.raw_client import BODY, GOOD, HOST, LAST, LENGTH, POST

CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = chunk(BODY[:9]) + chunk(BODY[9:]) + b"0\r\n\r\n"
NEXT = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"  # what one tries to smuggle

_FRAGMENTS = (
    b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b";", b",", b"0\r\n\r\n", b"0", b"ffffffff",
    b"\r\n\r\n", b"chunked", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n",
    b"Content-Length: 0\r\n", b"Content-Length: 5\r\n", b"Content-Length: 999\r\n", b"Host: y\r\n",
    b"Expect: 100-continue\r\n", b"Expect: x\r\n", b"Connection: keep-alive\r\n", b"HTTP/1.0",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"Connection: close\r\n", b"HTTP/1.1", NEXT,
    b"Content-Encoding: gzip\r\n", b"GET ", b"OPTIONS ", b"HEAD ", b"CONNECT ", b"http://y", b"//",
    b"\xff", b"\xc2\xa0", b"\x0b", b"\x7f", b"%0d%0a", b"x" * 9000, b"trailer: a\r\n", GOOD,
    b"Authorization: a\r\n", b"traceparent: \xff\r\n", b"x-request-id: y\r\n", CHUNKS, CHUNKED,
)  # fmt: skip
_BASES = (
    GOOD, LAST, POST + HOST + CHUNKED + b"\r\n" + CHUNKS, GOOD + GOOD,
    POST + HOST + CHUNKED + b"Expect: 100-continue\r\n\r\n" + CHUNKS,
    POST.replace(b"1.1", b"1.0") + LENGTH + b"\r\n" + BODY,
    b"GET /v1/models?a=b HTTP/1.1\r\nHost: x\r\n\r\n" + GOOD,
)  # fmt: skip


def mutant(choose: Callable[[int], int]) -> list[bytes]:
    """A damaged request in the segments in which it is sent. `choose(n)` gives 0 to n-1."""
    data = _BASES[choose(len(_BASES))]
    for _ in range(1 + choose(4)):
        at = choose(len(data) + 1)
        until = min(len(data), at + choose(13))
        match choose(6):
            case 0:
                data = data[:at] + _FRAGMENTS[choose(len(_FRAGMENTS))] + data[at:]
            case 1:
                data = data[:at] + bytes([choose(256)]) + data[at + 1 :]
            case 2:
                data = data[:at] + data[until:]
            case 3:
                data = data[:at] + _FRAGMENTS[choose(len(_FRAGMENTS))] + data[until:]
            case 4:
                data = data[:until] + data[at:until] * (1 + choose(3)) + data[until:]
            case _:
                data = data[:at] + data[at:until].swapcase() + data[until:]
    cuts = sorted(choose(len(data) + 1) for _ in range(choose(3)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
