"""The Prometheus metrics of the proxy.

Labels come from the configuration and the key file, never from clients. Measurements that
OpenTelemetry's conventions for generative AI define are exported under their name too, with the
prescribed buckets (github.com/open-telemetry/semantic-conventions-genai,
docs/gen-ai/gen-ai-metrics.md). The model is not a label, because clients choose it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from typing import cast

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forebay.proxy.core.learn.prefix_cache import PrefixError
from forebay.proxy.core.model import Action
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.telemetry.logs.access_log import LOGGER
from forebay.proxy.telemetry.logs.log_queue import dropped_lines
from forebay.proxy.telemetry.metrics.counters import BucketHistogram, Counter
from forebay.proxy.telemetry.metrics.live_history import LiveHistory
from forebay.proxy.telemetry.metrics.tenant_labels import TenantLabels
from forebay.proxy.telemetry.record import CLIENT_GONE, RequestRecord
from forebay.traces.ground.hlog import IntervalLog

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
BACKEND_SECONDS = (*SECONDS[1:], 300.0, 600.0)
RATIOS = (0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 4.0, 8.0)
LAGS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
GEN_AI_DURATION = tuple(0.01 * 2**n for n in range(14))
GEN_AI_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_EACH = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
GEN_AI_TOKENS = tuple(4.0**n for n in range(14))

# A backend may return any status; others than these are counted as 4xx and so on.
STATUSES = {
    status: str(status)
    for status in (200, 400, 401, 404, 408, 413, 429, CLIENT_GONE, 500, 502, 503, 504)
}
KINDS = frozenset(  # kinds of backends.failures.Failure
    {
        *("connect", "before_first_byte", "timeout", "mid_stream", "abort", "empty", "hang"),
        *("full", "5xx", "5xx_event", "4xx_event", "content_type", "encoding", "framing"),
        *("bad_http", "large_head", "bad_coding", "bad_status", "transfer_coding"),
        *("no_model", "not_json", "only_heartbeats", "redirect", "status", "too_large"),
        *("draining", "shortage", "own_limit"),
    }
)


# A class declares its metrics with these. Each object makes its own, in its registry.
def counter(name: str, labels: str, text: str) -> Counter:
    return cast("Counter", partial(Counter, f"forebay_{name}", text, labels.split()))


def gauge(name: str, labels: str, text: str) -> Gauge:
    return cast("Gauge", partial(Gauge, f"forebay_{name}", text, labels.split()))


def histogram(name: str, labels: str, text: str, edges: Sequence[float]) -> BucketHistogram:
    declared = partial(BucketHistogram, name, text, labels.split(), buckets=edges)
    return cast("BucketHistogram", declared)


class ProxyMetrics:
    """Counters and histograms of one proxy, in a registry of its own."""

    # How requests ended, and why some were rejected or failed.
    answers = counter(
        "responses", "bucket status", "Responses; 499: the client left, cut: it failed after a 200"
    )
    _tenants = counter(
        "tenant_requests",
        "tenant status",
        "Responses, by tenant and status; none: no keys, or no valid one",
    )
    rejects = counter("rejects", "bucket reason", "Requests rejected, by reason")
    _shed = counter("shed", "class", "Requests rejected to protect the proxy itself, by class")
    upstream_errors = counter("upstream_errors", "backend kind", "Failures of a backend, by kind")
    retries = counter("retries", "backend", "Requests retried after this backend failed")
    streams_continued = counter(
        "streams_continued", "backend", "Streams that this backend went on with after another one"
    )
    # The work of each backend, and its duration.
    prompt_tokens = counter("prompt_tokens", "backend", "Prompt tokens, as the backend counts")
    cached_tokens = counter(
        "cached_tokens", "backend", "Prompt tokens found in the prefix cache, as the backend counts"
    )
    _backend_requests = counter(
        "backend_requests",
        "backend bucket outcome",
        "Requests sent to the backend, by how they ended",
    )
    _backend_ttft = histogram(
        "forebay_backend_time_to_first_token_seconds",
        "backend bucket",
        "Time from dispatch to the backend to the first event",
        BACKEND_SECONDS,
    )
    _backend_predicted = counter(
        "backend_predicted_time_to_first_token_seconds",
        "backend bucket",
        "Sum of the predictions for the requests whose time to first token was observed",
    )
    _backend_duration = histogram(
        "forebay_backend_request_duration_seconds",
        "backend bucket",
        "Time from arrival at the proxy to the last byte, of successful requests",
        BACKEND_SECONDS,
    )
    # Times of requests, as clients see them.
    ttft = histogram(
        "forebay_time_to_first_token_seconds",
        "bucket",
        "Time from arrival at the proxy to the first event",
        SECONDS,
    )
    queue = histogram(
        "forebay_queue_seconds", "bucket", "Time in the queue before dispatch or rejection", SECONDS
    )
    prediction = histogram(
        "forebay_ttft_prediction_ratio",
        "bucket",
        "Time from dispatch to the first event, observed over predicted",
        RATIOS,
    )
    # The state of the proxy itself.
    lag = histogram(
        "forebay_event_loop_lag_seconds",
        "",
        "Delay of the event loop in waking a sleeping task",
        LAGS,
    )
    client_waits = counter(
        "client_wait_seconds",
        "direction",
        "Time in which prompts came (upload), or clients had much to take (download)",
    )
    _reloads = counter("config_reloads", "result", "Reloads of the configuration, by result")
    _generation = gauge(
        "config_generation", "", "Reloads of the configuration that changed something"
    )
    shedding = gauge(
        "shedding_classes", "", "Service classes rejected now to protect the proxy itself"
    )
    alone = gauge("alone", "", "1 while the proxy should exchange its load with others and cannot")
    _build = gauge("build_info", "version", "Always 1")
    # The same times under the names of OpenTelemetry's conventions.
    _duration = histogram(
        "gen_ai_server_request_duration_seconds",
        "gen_ai_operation_name error_type",
        "Time from arrival to the last byte, of requests that were sent to a backend",
        GEN_AI_DURATION,
    )
    _first = histogram(
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_operation_name",
        "Time from arrival to the first token, of successful streams",
        GEN_AI_FIRST,
    )
    _each = histogram(
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_operation_name",
        "Time per output token after the first, of successful streams",
        GEN_AI_EACH,
    )
    _usage = histogram(
        "gen_ai_client_token_usage",
        "gen_ai_operation_name gen_ai_token_type",
        "Tokens of a request, by type",
        GEN_AI_TOKENS,
    )

    def __init__(
        self,
        shaper: Shaper,
        connections: Callable[[], int] = lambda: 0,
        tenants: Iterable[str] = (),
    ) -> None:
        """`tenants` always have a label of their own."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series
        self._shaper = shaper
        self.log: IntervalLog | None = None  # gets each TTFT as well
        self.history: LiveHistory | None = None  # counts each request as well
        self.tenant_labels = TenantLabels(tenants)
        self.registry = registry = CollectorRegistry()
        registry.register(_ShaperMetrics(shaper, connections))
        ProcessCollector(registry=registry)
        # Make what the class declares. Series of a removed backend are dropped, so they are listed.
        self._by_backend: list[Counter | BucketHistogram] = []
        for name, declared in vars(ProxyMetrics).items():
            if isinstance(declared, partial):
                metric = declared(registry=registry)
                setattr(self, name, metric)
                if "backend" in declared.args[-1]:
                    self._by_backend.append(metric)
        # Series that exist before anything happens.
        self._build.labels(version("forebay")).set(1)
        self.client_waits.of[("upload",)].inc(0.0)
        for result in ("applied", "partly", "unchanged", "failed"):
            self._reloads.of[(result,)].inc(0.0)

    def first_token(self, record: RequestRecord, now: float) -> None:
        """The first event of a request has come."""
        bucket, backend = record.bucket, record.backend
        assert record.sent_at is not None
        assert record.predicted_ttft_s is not None
        ttft_s, sent_s = now - record.arrived_at, now - record.sent_at
        predicted_s = record.predicted_ttft_s
        self.ttft.of[(bucket,)].observe(ttft_s)
        self.prediction.of[(bucket,)].observe(sent_s / max(1e-6, predicted_s))
        self._backend_ttft.of[backend, bucket].observe(sent_s)
        self._backend_predicted.of[backend, bucket].inc(predicted_s)
        if self.log is not None:
            self.log.record(f"ttft.{bucket}", ttft_s)
        if self.history is not None:
            self.history.first_token(record, ttft_s)

    def decided(self, now: float, action: Action) -> None:
        """Note how long a request had waited when the shaper decided."""
        if action.bucket:
            self.queue.of[(action.bucket,)].observe(action.queued_s)

    def rejected(self, bucket: str, reason: str) -> None:
        """A request was rejected, by the policy for a RejectReason. `hold` may keep it."""
        self.rejects.of[bucket or "none", reason].inc()

    def error_sent(self, record: RequestRecord, code: str) -> None:
        """Count an error as a rejection if it is no decision of the policy."""
        if code in ("no_backend_available", "queue_full") and not record.rejected:
            self.rejected(record.bucket, code)

    def shed(self, service_class: str) -> None:
        """A request was rejected because the proxy is overloaded."""
        self._shed.of[(service_class,)].inc()

    def upstream_error(self, backend: str, kind: str) -> None:
        """A backend failed. `kind` is one of KINDS."""
        self.upstream_errors.of[backend, kind if kind in KINDS else "other"].inc()

    def used(self, backend: str, prompt_tokens: int, cached_tokens: int) -> None:
        """Count the usage of one response."""
        self.prompt_tokens.of[(backend,)].inc(prompt_tokens)
        self.cached_tokens.of[(backend,)].inc(cached_tokens)

    def uploaded(self, seconds: float) -> None:
        """A client has sent its body, or has left, after `seconds`."""
        self.client_waits.of[("upload",)].inc(seconds)

    def reloaded(self, result: str, generation: int) -> None:
        """A reload ended. `result` is applied, partly, unchanged or failed."""
        self._reloads.of[(result,)].inc()
        self._generation.set(generation)

    def finished(self, record: RequestRecord, status: int, now: float) -> None:
        """A request has been answered, or its client has left."""
        label = _label(status, record.reason)
        bucket, backend = record.bucket, record.backend
        self.answers.of[bucket, label].inc()
        self._tenants.of[self.tenant_labels.label(record.tenant), label].inc()
        if self.history is not None:
            self.history.finished(record, status)
        if not record.operation or record.sent_at is None:
            return
        operation = record.operation
        failed = status >= 400 or bool(record.reason)
        outcome = outcome_of(status) if status >= 400 else "cut" if failed else "ok"
        self._backend_requests.of[backend, bucket, outcome].inc()
        lasted_s = now - record.arrived_at
        error = f"{status // 100}xx" if status >= 400 else "stream" if failed else ""
        self._duration.of[operation, error].observe(lasted_s)
        if failed:
            return
        self._backend_duration.of[backend, bucket].observe(lasted_s)
        if record.first_token_at is not None:
            self._first.of[(operation,)].observe(record.first_token_at - record.arrived_at)
            if (each_s := record.time_per_output_token_s(now)) is not None:
                self._each.of[(operation,)].observe(each_s)
        if record.prompt_tokens:
            self._usage.of[operation, "input"].observe(record.prompt_tokens)
            self._usage.of[operation, "output"].observe(record.output_tokens)

    def text(self) -> bytes:
        """Return all metrics. Metrics of removed backends are dropped first."""
        for family in self._by_backend:
            family.of.keep("backend", self._shaper.backends)
        return generate_latest(self.registry)


def outcome_of(status: int) -> str:
    """Return the outcome, a label, of a request that a backend was sent and that has failed."""
    if status == CLIENT_GONE:
        return "client_left"
    return "failed" if status == 429 or status >= 500 else "client_error"


class _ShaperMetrics:
    """The state of the shaper, read at each scrape."""

    def __init__(self, shaper: Shaper, connections: Callable[[], int]) -> None:
        self._shaper = shaper
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        # Gauges of each backend.
        per_backend: dict[str, tuple[str, Callable[[Backend], float]]] = {
            "backend_up": ("1 if the backend takes work", lambda b: b.up),
            "in_flight_requests": (
                "Requests sent to the backend and not finished",
                lambda b: len(b.in_flight) + b.passing,
            ),
            "prefilling_requests": (
                "Requests sent to the backend that have no first token yet",
                lambda b: len(b.prefills),
            ),
            "queued_requests": ("Requests waiting for the backend", lambda b: b.queued),
            "prefix_index_blocks": (
                "Prompt blocks that the backend is assumed to have cached",
                lambda b: len(b.cache.prefixes),
            ),
        }
        for name, (text, read) in per_backend.items():
            family = GaugeMetricFamily(f"forebay_{name}", text, labels=["backend"])
            for backend in self._shaper.backends.values():
                family.add_metric([backend.name], float(read(backend)))
            yield family
        # Sums of the predictions of cached tokens.
        sums: dict[str, tuple[str, Callable[[PrefixError], float]]] = {
            "predicted_cached_tokens": (
                "Prompt tokens predicted to be cached",
                lambda e: e.predicted_tokens,
            ),
            "reported_cached_tokens": (
                "Prompt tokens reported as cached",
                lambda e: e.reported_tokens,
            ),
            "cached_tokens_error": (
                "Sum of the absolute differences between predicted and reported cached tokens",
                lambda e: e.absolute_tokens,
            ),
            "cached_tokens_answers": ("Responses that reported cached tokens", lambda e: e.answers),
        }
        for name, (text, amount) in sums.items():
            counted = CounterMetricFamily(f"forebay_{name}", text, labels=["backend"])
            for backend in self._shaper.backends.values():
                counted.add_metric([backend.name], amount(backend.cache.error))
            yield counted
        # Facts of the proxy itself.
        family = GaugeMetricFamily("forebay_queue_depth", "Waiting requests", labels=["bucket"])
        for bucket in self._shaper.buckets:
            family.add_metric([bucket], self._shaper.queued(bucket))
        yield family
        yield CounterMetricFamily(
            "forebay_log_lines_dropped",
            "Log lines that were not written: nobody reads them, or the disk is full",
            value=dropped_lines(LOGGER),
        )
        yield GaugeMetricFamily(
            "forebay_client_connections", "Open client connections", value=self._connections()
        )


def _label(status: int, reason: str) -> str:
    """Return the label of a status, "cut" if the response failed after that was sent."""
    if status < 400 and reason:
        return "cut"
    return STATUSES.get(status) or f"{status // 100}xx"
