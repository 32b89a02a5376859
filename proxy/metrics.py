"""What the proxy tells Prometheus. Labels come from the configuration only, never from clients."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forebay.proxy.core.backend import Backend
from forebay.proxy.core.model import Action, Reject
from forebay.proxy.core.prefix_error import PrefixError
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.hlog import IntervalLog

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
RATIOS = (0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 4.0, 8.0)


class ProxyMetrics:
    """Counters and histograms of one proxy, in a registry of its own."""

    def __init__(self, shaper: Shaper) -> None:
        self.log: IntervalLog | None = None  # where each TTFT goes as well
        self.registry = registry = CollectorRegistry()
        registry.register(_Books(shaper))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"forebay_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(
                f"forebay_{name}", text, labels, registry=registry, buckets=tuple(buckets)
            )

        self.answers = counter("responses", "Answers by bucket and status", "bucket", "status")
        self.rejects = counter("rejects", "Requests refused", "bucket", "reason")
        self.client_gone = counter("client_disconnects", "Clients that left first", "bucket")
        self.upstream_errors = counter("upstream_errors", "Backend failures", "backend", "kind")
        self.retries = counter("retries", "Requests tried on another backend", "backend")
        self.prompt_tokens = counter("prompt_tokens", "As the backend counted", "backend")
        self.cached_tokens = counter("cached_tokens", "As the backend counted", "backend")
        self.ttft = histogram(
            "time_to_first_token_seconds", "From arrival to first event", SECONDS, "bucket"
        )
        self.queue = histogram("queue_seconds", "Wait in the proxy", SECONDS, "bucket")
        self.prediction = histogram(
            "ttft_prediction_ratio", "Observed over predicted, from dispatch", RATIOS, "bucket"
        )

    def first_token(self, bucket: str, seconds: float) -> None:
        """A first event came, so long after the request did."""
        self.ttft.labels(bucket).observe(seconds)
        if self.log is not None:
            self.log.record(f"ttft.{bucket}", seconds)

    def decided(self, now: float, action: Action) -> None:
        """One decision of the shaper."""
        self.queue.labels(action.bucket or "none").observe(action.queued_s)
        if isinstance(action, Reject):
            self.rejects.labels(action.bucket or "none", action.reason).inc()

    def used(self, backend: str, prompt_tokens: int, cached_tokens: int) -> None:
        """Usage of one answer."""
        self.prompt_tokens.labels(backend).inc(prompt_tokens)
        self.cached_tokens.labels(backend).inc(cached_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Books:
    """The shaper's books, read when somebody asks."""

    def __init__(self, shaper: Shaper) -> None:
        self._shaper = shaper

    def collect(self) -> Iterable[Metric]:
        per_backend: dict[str, tuple[str, Callable[[Backend], float]]] = {
            "backend_up": ("The backend takes work", lambda b: b.up),
            "in_flight": ("Requests sent and not finished", lambda b: len(b.flights)),
            "prefills": ("Of those, without a first token", lambda b: len(b.prefills)),
            "queued": ("Requests waiting for the backend", lambda b: b.queued),
            "prefix_index_blocks": (
                "Prompt blocks it is believed to hold",
                lambda b: len(b.prefixes),
            ),
        }
        for name, (text, read) in per_backend.items():
            family = GaugeMetricFamily(f"forebay_{name}", text, labels=["backend"])
            for backend in self._shaper.backends.values():
                family.add_metric([backend.name], float(read(backend)))
            yield family
        sums: dict[str, tuple[str, Callable[[PrefixError], float]]] = {
            "predicted_cached_tokens": ("Predicted to be cached", lambda e: e.predicted_tokens),
            "reported_cached_tokens": ("Cached, as answers said", lambda e: e.reported_tokens),
            "cached_tokens_error": ("Sum of the differences", lambda e: e.absolute_tokens),
            "cached_tokens_answers": ("Answers that said it", lambda e: e.answers),
        }
        for name, (text, amount) in sums.items():
            counted = CounterMetricFamily(f"forebay_{name}", text, labels=["backend"])
            for backend in self._shaper.backends.values():
                counted.add_metric([backend.name], amount(backend.prefix_error))
            yield counted
        family = GaugeMetricFamily("forebay_queue_depth", "Requests waiting", labels=["bucket"])
        for bucket in self._shaper.buckets:
            family.add_metric([bucket], self._shaper.queued(bucket))
        yield family
