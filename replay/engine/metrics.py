"""What a vLLM server counts, under vLLM's metric names and labels.

Counting happens once a token, so it is plain integers here; the Prometheus objects are made when
somebody scrapes. All times are simulated seconds.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import Request

# vLLM's buckets, seconds.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class Histogram:
    """Counts per bucket, cumulative only when read."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or below it), as Prometheus wants them."""
        below, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            below += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(below)))
        return rows


class EngineMetrics:
    """The counters of one server, collected into a registry of its own."""

    def __init__(self, core: EngineCore, served_name: str) -> None:
        self._core = core
        self._labels = ("0", served_name)
        self._served_name = served_name
        self.ttft = Histogram(TTFT_BUCKETS)
        self.inter_token = Histogram(TOKEN_BUCKETS)
        self.per_output_token = Histogram(TOKEN_BUCKETS)
        self.e2e = Histogram(REQUEST_BUCKETS)
        self.queue_time = Histogram(REQUEST_BUCKETS)
        self.prefill_time = Histogram(REQUEST_BUCKETS)
        self.success = dict.fromkeys(FINISHED_REASONS, 0)
        self.rejections = dict.fromkeys(REJECTION_REASONS, 0)
        self.lag_s = 0.0  # how far the server is behind its own clock, simulated seconds
        self.max_lag_s = 0.0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def first_token(self, request: Request, now: float) -> None:
        self.ttft.observe(now - request.arrival_s)
        self.queue_time.observe(request.admitted_s - request.arrival_s)
        self.prefill_time.observe(now - request.admitted_s)

    def finished(self, request: Request, now: float) -> None:
        self.success[request.finish_reason] += 1
        self.e2e.observe(now - request.arrival_s)
        if request.output_tokens > 1:
            gaps = request.output_tokens - 1
            self.per_output_token.observe((now - request.first_token_s) / gaps)

    def collect(self) -> Iterable[Metric]:
        """For the registry: every family, zero or not, as vLLM exports them from the start."""
        core = self._core
        for name, text, value in (
            ("num_requests_running", "Number of requests in execution batches.", core.running),
            ("num_requests_waiting", "Number of requests waiting.", core.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", core.kv_usage),
        ):
            yield self._family(GaugeMetricFamily, name, text, value)
        for name, text, value in (
            ("prefix_cache_queries", "Prefix cache queries, in tokens.", core.prefix_queries),
            ("prefix_cache_hits", "Prefix cache hits, in tokens.", core.prefix_hits),
            ("num_preemptions", "Cumulative number of preemptions.", core.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", core.prompt_tokens),
            ("generation_tokens", "Number of generation tokens.", core.generation_tokens),
        ):
            yield self._family(CounterMetricFamily, name, text, value)
        success = CounterMetricFamily(
            "vllm:request_success",
            "Count of successfully processed requests.",
            labels=("engine", "model_name", "finished_reason"),
        )
        for reason, count in self.success.items():
            success.add_metric((*self._labels, reason), count)
        yield success
        rejected = CounterMetricFamily(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            labels=("model_name", "reason"),
        )
        for reason, count in self.rejections.items():
            rejected.add_metric((self._served_name, reason), count)
        yield rejected
        yield from self._histograms()
        yield self._cache_config()
        for name, text, value in (
            ("lag_seconds", "How far the simulation is behind its clock now.", self.lag_s),
            ("max_lag_seconds", "The furthest it has been behind.", self.max_lag_s),
        ):
            yield GaugeMetricFamily(f"forebay_engine_{name}", text, value)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        family = kind(f"vllm:{name}", text, labels=("engine", "model_name"))
        family.add_metric(self._labels, value)
        return family

    def _histograms(self) -> Iterable[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Time to first token.", self.ttft),
            ("inter_token_latency_seconds", "Inter-token latency.", self.inter_token),
            (
                "request_time_per_output_token_seconds",
                "Time per output token of a request.",
                self.per_output_token,
            ),
            ("e2e_request_latency_seconds", "End-to-end request latency.", self.e2e),
            ("request_queue_time_seconds", "Time in WAITING.", self.queue_time),
            ("request_prefill_time_seconds", "Time in PREFILL.", self.prefill_time),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=("engine", "model_name"))
            family.add_metric(self._labels, histogram.buckets(), histogram.total)
            yield family

    def _cache_config(self) -> Metric:
        core = self._core
        values = {
            "engine": "0",
            "block_size": str(core.limits.block_size),
            "enable_prefix_caching": str(core.limits.enable_prefix_caching),
            "gpu_memory_utilization": str(core.config.gpu_memory_utilization),
            "num_gpu_blocks": str(core.pool.num_blocks),
            "num_gpu_blocks_override": str(core.config.num_gpu_blocks_override),
            "kv_cache_size_tokens": str(core.kv_tokens),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=list(values),
        )
        family.add_metric(list(values.values()), 1.0)
        return family
