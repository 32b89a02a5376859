"""Expose a server's counters under vLLM 0.32's metric names, types, labels and help texts.

Families that a simulated engine has no values for are left out: FLOP and memory traffic estimates,
external and multi-modal caches, request parameters, HTTP and process figures.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.loop.metrics import EngineHistogram, EngineMetrics

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
LABELS = ("engine", "model_name")
OTHER_TIERS = ("p2p", "disk", "external_unspecified")  # not simulated: always 0

Number = Callable[[EngineMetrics], float]
Numbers = Callable[[EngineMetrics], Mapping[str, float]]
GAUGES: dict[str, tuple[str, Number]] = {
    "num_requests_running": (
        "Number of requests in model execution batches.", lambda m: m.core.running),
    "num_requests_waiting": (
        "Number of requests waiting to be processed.", lambda m: m.core.waiting),
    "kv_cache_usage_perc": (
        "KV-cache usage. 1 means 100 percent usage.", lambda m: m.core.kv_usage),
}  # fmt: skip
COUNTERS: dict[str, tuple[str, Number]] = {
    "prefix_cache_queries": (
        "Prefix cache queries, in terms of number of queried tokens.",
        lambda m: m.core.prefix_queries),
    "prefix_cache_hits": (
        "Prefix cache hits, in terms of number of cached tokens.", lambda m: m.core.prefix_hits),
    "num_preemptions": (
        "Cumulative number of preemption from the engine.", lambda m: m.core.preemptions),
    "prompt_tokens": ("Number of prefill tokens processed.", lambda m: m.core.prompt_tokens),
    "prompt_tokens_cached": (
        "Number of cached prompt tokens (local + external).", lambda m: m.cached_tokens),
    "generation_tokens": (
        "Number of generation tokens processed.", lambda m: m.core.generation_tokens),
}  # fmt: skip
WITH_LABEL: dict[str, tuple[Family, str, str, Numbers]] = {
    "num_requests_waiting_by_reason": (
        GaugeMetricFamily,
        "Number of waiting requests by reason.",
        "reason",
        lambda m: {
            "capacity": m.core.waiting - m.core.scheduler.deferred,
            "deferred": m.core.scheduler.deferred,
        },
    ),
    "engine_sleep_state": (
        GaugeMetricFamily,
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is "
        "awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
        "sleep_state",
        lambda _: {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
    ),
    "prompt_tokens_by_source": (
        CounterMetricFamily,
        "Number of prompt tokens by source.",
        "source",
        lambda m: {
            "local_compute": m.core.prompt_tokens - m.cached_tokens,
            "local_cache_hit": m.cached_tokens - m.loaded_tokens,
            "external_kv_transfer": m.loaded_tokens,
        },
    ),
    "prompt_tokens_cached_by_source": (
        CounterMetricFamily,
        "Prefix-cache hit tokens by the cache tier that supplied them.",
        "source",
        lambda m: {
            "device": m.core.prefix_hits,
            "host": m.loaded_tokens,
            **dict.fromkeys(OTHER_TIERS, 0),
        },
    ),
    "request_success": (
        CounterMetricFamily,
        "Count of successfully processed requests.",
        "finished_reason",
        lambda m: m.success,
    ),
}
"""Metrics with one more label."""
DRAFTS: dict[str, tuple[str, Number]] = {
    "spec_decode_num_drafts": ("Number of spec decoding drafts.", lambda m: sum(m.core.drafted)),
    "spec_decode_num_draft_tokens": (
        "Number of draft tokens.",
        lambda m: (len(m.core.drafted) - 1) * sum(m.core.drafted),
    ),
    "spec_decode_num_accepted_tokens": (
        "Number of accepted tokens.",
        lambda m: sum(_by_position(m).values()),
    ),
}
"""Counters of speculative decoding, which a vLLM without it does not export."""
HISTOGRAMS: dict[str, tuple[str, Callable[[EngineMetrics], EngineHistogram]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", lambda m: m.prompt_length),
    "request_generation_tokens": (
        "Number of generation tokens processed.", lambda m: m.output_length),
    "iteration_tokens_total": (
        "Histogram of number of tokens per engine_step.", lambda m: m.step_tokens),
    "request_params_n": ("Histogram of the n request parameter.", lambda m: m.choices),
    "time_to_first_token_seconds": (
        "Histogram of time to first token in seconds.", lambda m: m.ttft),
    "inter_token_latency_seconds": (
        "Histogram of inter-token latency in seconds.", lambda m: m.inter_token),
    "request_time_per_output_token_seconds": (
        "Histogram of time_per_output_token_seconds per request.", lambda m: m.per_output_token),
    "e2e_request_latency_seconds": (
        "Histogram of e2e request latency in seconds.", lambda m: m.e2e),
    "request_queue_time_seconds": (
        "Histogram of time spent in WAITING phase for request.", lambda m: m.queue_time),
    "request_inference_time_seconds": (
        "Histogram of time spent in RUNNING phase for request.", lambda m: m.inference_time),
    "request_prefill_time_seconds": (
        "Histogram of time spent in PREFILL phase for request.", lambda m: m.prefill_time),
    "request_decode_time_seconds": (
        "Histogram of time spent in DECODE phase for request.", lambda m: m.decode_time),
    "request_num_preemptions": (
        "Histogram of the number of times a request was preempted.", lambda m: m.preempted),
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        lambda m: m.computed_prompt),
}  # fmt: skip


class Exposition:
    """A registry of one server's metrics: series of each engine, labelled with its rank."""

    def __init__(self, *engines: EngineMetrics) -> None:
        self._engines = engines
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield every family, zero or not, as vLLM exports them from the start."""
        yield from self._counters()
        yield from self._histograms()
        yield self._cache_config()
        yield from self._lag()

    def _lag(self) -> Iterable[Metric]:
        """Yield how far the simulation is behind: the engine that is furthest."""
        lag = max(engine.lag_s for engine in self._engines)
        most = max(engine.max_lag_s for engine in self._engines)
        for name, text, value in (
            ("lag_seconds", "How far the simulation is behind its clock now.", lag),
            ("max_lag_seconds", "The furthest it has been behind.", most),
        ):
            yield GaugeMetricFamily(f"forebay_engine_{name}", text, value)
        family = HistogramMetricFamily(
            "forebay_engine_step_lag_seconds", "How far it was behind, by step."
        )
        behind = [engine.step_lag for engine in self._engines]
        rows = zip(*(histogram.buckets() for histogram in behind), strict=True)
        buckets = [(row[0][0], sum(count for _, count in row)) for row in rows]
        family.add_metric((), buckets, sum(histogram.total for histogram in behind))
        yield family

    def _counters(self) -> Iterable[Metric]:
        # Gauges first, of each kind those with one more label last.
        drafts = self._engines[0].core.speculation is not None
        counters = COUNTERS | DRAFTS if drafts else COUNTERS
        for kind, plain in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, counters)):
            for name, (text, number) in plain.items():
                yield self._one(kind, name, text, number)
            for name, (family, text, label, numbers) in WITH_LABEL.items():
                if family is kind:
                    yield self._several(kind, name, text, label, numbers)
        if drafts:
            yield self._several(
                CounterMetricFamily,
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted tokens per draft position.",
                "position",
                _by_position,
            )
        # vLLM leaves the engine out of the labels of this metric.
        rejected = CounterMetricFamily(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            labels=("model_name", "reason"),
        )
        first = self._engines[0]
        for reason, count in first.rejections.items():
            rejected.add_metric((first.served_name, reason), count)
        yield rejected

    def _histograms(self) -> Iterable[Metric]:
        for name, (text, chosen) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for labels, engine in self._labelled():
                histogram = chosen(engine)
                family.add_metric(labels, histogram.buckets(), histogram.total)
            yield family

    def _cache_config(self) -> Metric:
        rows = [_cache_of(rank, engine.core) for rank, engine in enumerate(self._engines)]
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=list(rows[0]),
        )
        for row in rows:
            family.add_metric(list(row.values()), 1.0)
        return family

    def _labelled(self) -> Iterable[tuple[tuple[str, str], EngineMetrics]]:
        """Yield the engines, each with the values of LABELS."""
        for rank, engine in enumerate(self._engines):
            yield (str(rank), engine.served_name), engine

    def _one(self, kind: Family, name: str, text: str, number: Number) -> Metric:
        family = kind(f"vllm:{name}", text, labels=LABELS)
        for labels, engine in self._labelled():
            family.add_metric(labels, number(engine))
        return family

    def _several(self, kind: Family, name: str, text: str, label: str, numbers: Numbers) -> Metric:
        family = kind(f"vllm:{name}", text, labels=(*LABELS, label))
        for labels, engine in self._labelled():
            for which, value in numbers(engine).items():
                family.add_metric((*labels, which), value)
        return family


def _by_position(metrics: EngineMetrics) -> Mapping[str, float]:
    """Return the drafts whose token at each position was accepted."""
    by_accepted = metrics.core.drafted
    return {str(n): sum(by_accepted[n + 1 :]) for n in range(len(by_accepted) - 1)}


def _cache_of(rank: int, core: EngineCore) -> dict[str, str]:
    return {
        "engine": str(rank),
        "block_size": str(core.limits.block_size),
        "enable_prefix_caching": str(core.limits.enable_prefix_caching),
        "gpu_memory_utilization": str(core.config.gpu_memory_utilization),
        "num_gpu_blocks": str(core.pool.num_blocks),
        "num_gpu_blocks_override": str(core.config.num_gpu_blocks_override),
        "kv_cache_size_tokens": str(core.kv_tokens),
    }
