"""Which headers of a server reach the client, and with which values."""

import pytest
from fakes.faulty_backends import answers
from stages.proxy_stage import on_stage

from forebay.proxy.http1.headers import to_client


@pytest.mark.parametrize(
    ("status", "sent", "passed"),
    [
        (429, {"retry-after": "7"}, {"retry-after": "7"}),
        (429, {"retry-after": "86400"}, {"retry-after": "86400"}),
        (429, {"retry-after": "-5"}, {}),
        (429, {"retry-after": "0"}, {}),
        (429, {"retry-after": "1.5"}, {}),
        (503, {"retry-after": "1e308"}, {}),
        (503, {"retry-after": "9" * 400}, {}),
        (503, {"retry-after": "86401"}, {}),
        (503, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, {}),
        (503, {"retry-after": "\u00b2"}, {}),
        (503, {"retry-after-ms": "1500"}, {"retry-after-ms": "1500"}),
        (503, {"retry-after-ms": "-1"}, {}),
        (200, {"retry-after": "7", "retry-after-ms": "7"}, {}),
        (200, {"cache-control": "public"}, {}),
        (200, {"cache-control": "public, no-cache"}, {}),
        (200, {"cache-control": "max-age=60"}, {}),
        (404, {"cache-control": "s-maxage=60"}, {}),
        (200, {"cache-control": "no-cache"}, {"cache-control": "no-cache"}),
        (200, {"content-type": "text/event-stream"}, {"content-type": "text/event-stream"}),
    ],
)
def test_waits_and_cache_control_of_a_server(
    status: int, sent: dict[str, str], passed: dict[str, str]
) -> None:
    assert to_client(sent, status) == passed


@pytest.mark.parametrize("wait", ["-5", "1e308", "9" * 400, "soon"])
async def test_a_wait_that_is_no_wait_is_replaced_by_ours(wait: str) -> None:
    serve = answers(429, b"{}", f"retry-after: {wait}")
    async with on_stage(serve) as (on, _), on.post() as response:
        assert (response.status, response.headers["retry-after"]) == (429, "1")
