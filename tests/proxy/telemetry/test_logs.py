"""Logs state what happened, and never hold prompts."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
import pytest
from fakes.faulty_backends import resets, streams
from stages.proxy_stage import EVENT, RawBackend, by_request, on_stage, stage

from forebay.proxy.config.sections import Logs
from forebay.proxy.log_events import LogEvent
from forebay.proxy.telemetry.logs.access_log import LOGGER, configure_logs, say
from forebay.proxy.telemetry.logs.rejection_log import RejectionLog
from forebay.proxy.telemetry.record import RequestRecord
from forebay.replay.clock.virtual_loop import run

SECRET = "the-secret-prompt"


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    handlers, level, propagate = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    yield
    LOGGER.handlers[:], LOGGER.propagate = handlers, propagate
    LOGGER.setLevel(level)


def lines(logs: dict[str, Any], serve: Any = by_request, **body: Any) -> list[str]:
    """The log lines of one served request."""
    out = io.StringIO()

    async def main() -> None:
        configure_logs(Logs(**logs), out)
        async with on_stage(serve, logs=logs) as (on, _):
            fields = {"prompt": SECRET, "model": SECRET, "max_tokens": 3, **body}
            headers = {"authorization": f"Bearer {SECRET}", "x-request-id": "req-1"}
            async with on.post(fields, f"/v1/completions?q={SECRET}", headers=headers) as answer:
                with suppress(aiohttp.ClientError):  # a cut stream
                    await answer.read()
            async with on.client.get(f"{on.url}/{SECRET}", headers={"user-agent": SECRET}):
                pass

    run(main())
    return out.getvalue().splitlines()


@pytest.mark.parametrize("format_", ["console", "json"])
@pytest.mark.parametrize("streams", [True, False])
def test_nothing_of_a_request_is_in_the_log(format_: str, streams: bool) -> None:
    found = lines({"format": format_, "level": "debug"}, stream=streams)
    assert len(found) == 2
    assert SECRET not in "\n".join(found)


def test_the_line_of_a_request() -> None:
    first, other = map(json.loads, lines({"format": "json", "sample": 1.0}, stream=True))
    assert first.pop("time").endswith("Z")
    for key in ("duration_ms", "queue_ms", "ttft_ms"):
        assert first.pop(key) >= 0
    assert first == {
        "level": "info",
        "message": "request",
        "event": "request",
        "request_id": "req-1",
        "status": 200,
        "operation": "text_completion",
        "bucket": "chat",
        "service_class": "standard",
        "backend": "b0",
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "output_tokens": 3,
    }
    assert (other["status"], other["operation"], other["reason"]) == (404, "other", "not_found")


def test_a_cut_stream_says_why() -> None:
    cut = streams(EVENT, end="reset")

    first, _ = map(json.loads, lines({"format": "json", "sample": 1.0}, cut, stream=True))
    assert (first["status"], first["reason"]) == (200, "upstream_stream_error")


def test_requests_are_logged_only_when_asked_for() -> None:
    assert lines({}) == []
    assert lines({"sample": 1.0, "level": "warning"}) == []


def test_a_sample_is_a_share() -> None:
    from forebay.proxy.telemetry.logs.access_log import AccessLog

    access = AccessLog(Logs(sample=0.1))
    assert 800 < sum(access._sampled(f"{n:x}") for n in range(10_000)) < 1_200


def test_the_console_line() -> None:
    out = io.StringIO()
    configure_logs(Logs(), out)
    say(LogEvent.LISTENING, "listening on x")
    LOGGER.debug("not this")
    stamp, rest = out.getvalue().split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == "INFO    listening on x\n"
    assert logging.getLogger("forebay.proxy") is LOGGER


def scene(logs: dict[str, Any], serve: Any = by_request, urls: int = 1, **keys: Any) -> list[Any]:
    """The JSON lines while the first backend fails for a while, and works again."""
    out = io.StringIO()

    async def main() -> None:
        configure_logs(Logs(format="json", **logs), out)
        bad, good = RawBackend(serve), RawBackend(by_request)
        async with bad.running(), good.running(), AsyncExitStack() as stack:
            backends = [bad.url, good.url][:urls]
            on = await stack.enter_async_context(stage(backends, say=say, **keys))
            for _ in range(8):
                with suppress(aiohttp.ClientError):
                    await on.read()
            bad.healthy = False
            await asyncio.sleep(5)
            bad.healthy = True
            await asyncio.sleep(5)

    run(main())
    return [json.loads(line) for line in out.getvalue().splitlines()]


def events_of(found: list[Any]) -> list[tuple[str, ...]]:
    keys = ("level", "event", "backend", "reason")
    return [tuple(line.get(key, "") for key in keys) for line in found]


def test_a_backend_that_is_gone_is_a_warning_and_the_last_one_an_error() -> None:
    assert events_of(scene({"level": "warning"})) == [
        ("warning", "backend_down", "b0", "probes_failed"),
        ("error", "no_backend", "", ""),
    ]
    assert events_of(scene({"level": "error"})) == [("error", "no_backend", "", "")]
    assert [event for event in events_of(scene({})) if event[1] == "backend_up"] == [
        ("info", "backend_up", "b0", "probe_passed"),
        ("info", "backend_up", "b0", "probe_passed"),
    ]


def test_each_state_of_a_backend_is_an_event() -> None:
    found = events_of(scene({}, resets, urls=2, affinity={"kv_tokens": 1e6}))
    of_b0 = [event for event in found if event[2] == "b0" and event[1] != "backend_kv_cache"]
    assert of_b0[:3] == [
        ("info", "backend_up", "b0", "probe_passed"),
        ("warning", "backend_ejected", "b0", "failures"),
        ("warning", "backend_half_open", "b0", "trial"),
    ]
    assert of_b0[3:] == [
        ("warning", "backend_down", "b0", "probes_failed"),
        ("info", "backend_up", "b0", "probe_passed"),
    ]


def test_rejections_have_a_line_at_their_beginning_each_minute_and_at_their_end() -> None:
    said: list[tuple[str, str]] = []

    def listen(event: LogEvent, message: str, *_: str) -> None:
        said.append((event.label, message))

    log = RejectionLog(listen)
    for second in range(100):
        for number in range(6):
            record = RequestRecord(
                f"{second}-{number}", float(second), tenant="good", bucket="chat"
            )
            if number < 4:
                record.tenant, record.reason = "acme", "queue_full"
            log.finished(record, float(second))
        if second % 30 == 29:
            log.tick(float(second))
    for second in (119, 149):
        log.tick(float(second))
    assert [event for event, _ in said] == [
        "rejections_began", "rejections_go_on", "rejections_over",
    ]  # fmt: skip
    began, going, over = (message for _, message in said)
    assert began == (
        "requests are rejected: queue_full in bucket chat, the first one of tenant acme"
    )
    assert going.startswith("requests are still rejected: 360 of 540 requests (360 queue_full in")
    assert over == (
        "rejections are over after 99 s: 400 of 600 requests (400 queue_full in chat); 400 of "
        "tenant acme"
    )
