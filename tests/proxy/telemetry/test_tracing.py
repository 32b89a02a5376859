"""One span a request, a child of the client's, and the backend's parent."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fakes.faulty_backends import resets
from stages.proxy_stage import Call, RawBackend, by_request, on_stage, silent, stage

from forebay.proxy.config.sections import Tracing
from forebay.proxy.telemetry.logs.tracing import Tracer
from forebay.replay.clock.virtual_loop import run

pytest.importorskip("opentelemetry.sdk", reason="the extra forebay[otel] is not installed")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def spans(
    *bodies: dict[str, Any],
    serve: Any = by_request,
    headers: dict[str, str] | None = None,
    **tracing: Any,
) -> tuple[Sequence[ReadableSpan], list[Call]]:
    exporter = InMemorySpanExporter()
    calls: list[Call] = []

    async def main() -> None:
        tracer = Tracer(Tracing(enabled=True, **tracing), exporter)
        async with RawBackend(serve).running() as backend:
            async with stage([backend.url], tracer=tracer) as on:
                for body in bodies:
                    async with on.post(
                        {"prompt": "secret", "max_tokens": 3, **body}, headers=headers or {}
                    ) as answer:
                        await answer.read()
                async with on.client.get(on.url + "/health"):
                    pass
            calls.extend(backend.calls)

    run(main())
    return exporter.get_finished_spans(), calls


def test_a_stream_in_the_trace_of_its_client() -> None:
    (span,), (call,) = spans(
        {"stream": True}, headers={"traceparent": TRACEPARENT, "tracestate": "a=1"}
    )
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert f"traceparent: 00-{TRACE}-{span.context.span_id:016x}-01" in call.head
    assert "tracestate: a=1" in call.head
    assert (span.name, span.kind.name) == ("text_completion", "SERVER")
    assert [event.name for event in span.events] == ["prefill", "stream"]
    assert span.attributes is not None
    attributes = dict(span.attributes)
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "forebay.backend": "b0",
        "forebay.bucket": "chat",
        "http.response.status_code": 200,
    }
    assert "secret" not in span.to_json()


def test_without_a_traceparent_a_trace_begins_here() -> None:
    (one, two), (call, _) = spans({}, {})
    assert one.parent is None
    assert one.context is not None
    assert two.context is not None
    assert one.context.trace_id != two.context.trace_id
    assert f"{one.context.trace_id:032x}" in call.head


def test_a_failure_is_an_error() -> None:
    (span,), _ = spans({}, serve=resets)
    assert span.status.status_code.name == "ERROR"
    assert span.attributes is not None
    assert span.attributes["error.type"] == "upstream_error"
    assert span.attributes["http.response.status_code"] == 502


def test_an_unsampled_request_still_passes_its_trace_on() -> None:
    found, (call,) = spans({}, sample=0.0, headers={"traceparent": TRACEPARENT[:-2] + "00"})
    assert found == ()
    assert f"traceparent: 00-{TRACE}-" in call.head


async def test_a_client_that_leaves() -> None:
    exporter = InMemorySpanExporter()

    tracer = Tracer(Tracing(enabled=True), exporter)
    async with on_stage(silent, tracer=tracer) as (on, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), on.post():
                pass
        await asyncio.sleep(1)
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 499
