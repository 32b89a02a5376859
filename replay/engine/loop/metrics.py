"""Count as a vLLM server does, in plain numbers. `exposition` shows them in Prometheus' format.

Counters change with every token or step, so no objects are created here. All times are simulated
seconds.
"""

from bisect import bisect_left
from collections.abc import Sequence

from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import EngineRequest

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
# Tokens. vLLM's last bucket follows from its context length, here the context of a 128k model.
LENGTH_BUCKETS = (*(float(n * 10**p) for p in range(5) for n in (1, 2, 5)), 100_000.0)
STEP_BUCKETS = (1.0, *(float(8 << power) for power in range(12)))
COUNT_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class EngineHistogram:
    """Observations by bucket, which are summed up only when read."""

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
        """Return (upper bound, observations at or below it), as Prometheus wants them."""
        below, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            below += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(below)))
        return rows


class EngineMetrics:
    """The counters of one server, in addition to the engine's own, which `core` has."""

    def __init__(self, core: EngineCore, served_name: str) -> None:
        self.core = core
        self.served_name = served_name
        self.ttft = EngineHistogram(TTFT_BUCKETS)
        self.inter_token = EngineHistogram(TOKEN_BUCKETS)
        self.per_output_token = EngineHistogram(TOKEN_BUCKETS)
        self.e2e = EngineHistogram(REQUEST_BUCKETS)
        self.queue_time = EngineHistogram(REQUEST_BUCKETS)
        self.prefill_time = EngineHistogram(REQUEST_BUCKETS)
        self.decode_time = EngineHistogram(REQUEST_BUCKETS)
        self.inference_time = EngineHistogram(REQUEST_BUCKETS)
        self.step_tokens = EngineHistogram(STEP_BUCKETS)
        self.prompt_length = EngineHistogram(LENGTH_BUCKETS)
        self.output_length = EngineHistogram(LENGTH_BUCKETS)
        self.computed_prompt = EngineHistogram(LENGTH_BUCKETS)
        self.choices = EngineHistogram(COUNT_BUCKETS)
        self.preempted = EngineHistogram(PREEMPTION_BUCKETS)
        self.cached_tokens = 0  # cached tokens among `core.prompt_tokens`
        self.loaded_tokens = 0  # from the host's memory, among `cached_tokens`
        self.success = dict.fromkeys(FINISHED_REASONS, 0)
        self.rejections = dict.fromkeys(REJECTION_REASONS, 0)
        self.lag_s = 0.0  # how far the server is behind its own clock, simulated seconds
        self.max_lag_s = 0.0
        self.step_lag = EngineHistogram(LAG_BUCKETS)  # `lag_s` of every step

    def first_token(self, request: EngineRequest, now: float) -> None:
        self.cached_tokens += max(0, request.cached_tokens)
        self.loaded_tokens += request.loaded_tokens
        self.ttft.observe(now - request.arrival_s)
        self.queue_time.observe(request.admitted_s - request.queued_s)
        self.prefill_time.observe(now - request.admitted_s)

    def finished(self, request: EngineRequest, now: float) -> None:
        self.success[request.finish_reason] += 1
        self.e2e.observe(now - request.arrival_s)
        self.inference_time.observe(now - request.admitted_s)
        self.decode_time.observe(now - request.first_token_s)
        self.prompt_length.observe(request.prompt_tokens)
        self.output_length.observe(request.output_tokens)
        self.computed_prompt.observe(request.prompt_tokens - max(0, request.cached_tokens))
        self.choices.observe(1)
        self.preempted.observe(request.preemptions)
        if request.output_tokens > 1:
            gaps = request.output_tokens - 1
            self.per_output_token.observe((now - request.first_token_s) / gaps)
