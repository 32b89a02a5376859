"""One OpenTelemetry span for each shaped request, as a child of the client's span.

The packages (extra `forebay[otel]`) are imported only if tracing is on. The backend gets our span's
`traceparent`, so the spans of a vLLM that traces are children of ours.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forebay.proxy.config.sections import Tracing
from forebay.proxy.telemetry.record import RequestRecord
from forebay.traces.ground.errors import InputError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

TRACE_HEADERS = ("traceparent", "tracestate")


class OtelSpan:
    """The span of one request, a `RequestSpan`."""

    def __init__(self, span: "Span") -> None:
        self._span = span

    def headers(self) -> dict[str, str]:
        """Return the trace headers for the backend, in place of the client's."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span))
        return carrier

    def sent(self, backend: str, queued_s: float) -> None:
        """The request has left the queue: the prefill begins."""
        queued_ms = round(queued_s * 1e3, 1)
        self._span.add_event("prefill", {"forebay.backend": backend, "forebay.queue_ms": queued_ms})

    def first_token(self) -> None:
        self._span.add_event("stream")

    def finished(self, record: RequestRecord, status: int) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("forebay.bucket", record.bucket)
        if record.backend:
            span.set_attribute("forebay.backend", record.backend)
        if record.prompt_tokens:
            span.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", record.output_tokens)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", record.cached_tokens)
        if status >= 400 or record.reason:
            span.set_attribute("error.type", record.reason or str(status))
        if status >= 500 or (record.reason and status < 400):
            span.set_status(Status(StatusCode.ERROR))
        span.end()


class Tracer:
    """Starts spans, and exports them in the background."""

    def __init__(self, tracing: Tracing, exporter: "SpanExporter | None" = None) -> None:
        """Raises InputError if the packages are missing.

        Args:
            exporter: gets each span at once, for tests.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=tracing.endpoint))
            else:
                processor = SimpleSpanProcessor(exporter)  # type: ignore[assignment]
        except ImportError as error:
            raise InputError(
                "tracing.enabled: the packages are missing; pip install 'forebay[otel]'"
            ) from error
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(tracing.sample)),
            resource=Resource.create({"service.name": tracing.service_name}),
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("forebay.proxy")

    def start(self, headers: Mapping[str, str], operation: str) -> OtelSpan:
        """Start the span of a request with these headers."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        return OtelSpan(
            self._tracer.start_span(
                operation,
                context=TraceContextTextMapPropagator().extract(carrier),
                kind=SpanKind.SERVER,
                attributes={"gen_ai.operation.name": operation},
            )
        )

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()
