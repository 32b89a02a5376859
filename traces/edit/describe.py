"""Describe a trace in one pass: rates, burstiness, length quantiles, ideal prefix hit ratio.

Memory does not grow with the rows. It grows with distinct lengths, sessions and documents (one
number each), and with the distinct blocks of the ideal cache (see `sharing`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import ceil, sqrt
from typing import Any

from forebay.traces.edit.sharing import IdealCache
from forebay.traces.ground.schema import TraceRequest

_WINDOWS = 1024
_TENTHS = 10
_ENOUGH = 50  # requests in a tenth: chance halves one of ten such counts in 1 of 5,000 traces


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Mean, quantiles and maximum of lengths in tokens. Each quantile is an observed length."""

    mean: float
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class RateSpan:
    """A tenth of a trace, in seconds from its first arrival, and its requests a second."""

    from_s: float
    to_s: float
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Description:
    """The result of `forebay traces describe`. A value that the trace does not define is None.

    Attributes:
        duration_s: seconds from the first arrival to the last.
        rate_per_s: requests / duration_s.
        interarrival_cv: standard deviation / mean of the gaps. It is 1 for Poisson arrivals.
        peak_rate_1s, peak_rate_60s: requests a second in the busiest window of 1 s and of
            60 s, or of the whole trace, which is longer. The windows are consecutive from the first
            arrival. None for a shorter trace.
        dispersion_60s: variance / mean of requests in full 60 s windows. It is 1 for Poisson.
        slowest_tenth, fastest_tenth: the tenths of the duration with the fewest and the most
            requests. None if a tenth has fewer than 50 on average.
        steady: True if both are at most a factor of 2 from the mean rate.
        ideal_hit_ratio: share of input tokens that an infinite prefix cache would hit.
        reuse_share: share of requests that hit more than the blocks common to all requests.
        sessions, documents: number of distinct names.
    """

    requests: int
    duration_s: float
    rate_per_s: float | None
    interarrival_cv: float | None
    peak_rate_1s: float | None
    peak_rate_60s: float | None
    dispersion_60s: float | None
    slowest_tenth: RateSpan | None
    fastest_tenth: RateSpan | None
    steady: bool | None
    input_tokens: LengthSummary
    output_tokens: LengthSummary
    ideal_hit_ratio: float
    reuse_share: float
    sessions: int
    documents: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(requests: Iterable[TraceRequest]) -> Description:
    """Read every request once (ValueError: no request, for which a reader raises before)."""
    cache = IdealCache()
    gaps = _Gaps()
    seconds, minutes, profile = _Windows(1.0), _Windows(60.0), _Profile()
    inputs: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    hit_blocks: Counter[int] = Counter()
    sessions: set[int] = set()
    documents: set[int] = set()
    hit_tokens = 0.0
    first_s: float | None = None
    last_s = 0.0
    # One pass: a trace may be longer than memory.
    for request in requests:
        if first_s is None:
            first_s = request.arrival_s
        else:
            gaps.add(request.arrival_s - last_s)
        last_s = request.arrival_s
        seconds.add(last_s - first_s)
        minutes.add(last_s - first_s)
        profile.add(last_s - first_s)
        inputs[request.input_tokens] += 1
        outputs[request.output_tokens] += 1
        sharing = cache.look_up(request)
        hit_tokens += sharing.hit_tokens
        hit_blocks[sharing.hit_blocks] += 1
        if request.session is not None:
            sessions.add(hash(request.session))  # a hash is enough to count them
        if request.document is not None:
            documents.add(hash(request.document))
    if first_s is None:
        raise ValueError("no requests to describe")
    # The rest is arithmetic over the counters.
    count = inputs.total()
    duration_s = last_s - first_s
    total_tokens = sum(tokens * times for tokens, times in inputs.items())
    slowest, fastest, steady = profile.extremes(duration_s)
    reusing = sum(times for blocks, times in hit_blocks.items() if blocks > cache.root_blocks)
    return Description(
        requests=count,
        duration_s=duration_s,
        rate_per_s=count / duration_s if duration_s else None,
        interarrival_cv=gaps.variation(),
        peak_rate_1s=seconds.peak(count, duration_s),
        peak_rate_60s=minutes.peak(count, duration_s),
        dispersion_60s=minutes.dispersion(),
        slowest_tenth=slowest,
        fastest_tenth=fastest,
        steady=steady,
        input_tokens=_lengths(inputs),
        output_tokens=_lengths(outputs),
        ideal_hit_ratio=hit_tokens / total_tokens,
        reuse_share=reusing / count,
        sessions=len(sessions),
        documents=len(documents),
    )


def _lengths(counts: Counter[int]) -> LengthSummary:
    count = counts.total()
    ordered = sorted(counts)
    ranks = [ceil(quantile * count) for quantile in (0.5, 0.9, 0.99)]
    quantiles: list[int] = []
    below = 0
    for tokens in ordered:
        below += counts[tokens]
        while len(quantiles) < len(ranks) and below >= ranks[len(quantiles)]:
            quantiles.append(tokens)
    mean = sum(tokens * times for tokens, times in counts.items()) / count
    return LengthSummary(mean, quantiles[0], quantiles[1], quantiles[2], ordered[-1])


class _Gaps:
    """Mean and variance of gaps by Welford's method, which avoids cancellation in long traces."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, gap_s: float) -> None:
        self._count += 1
        delta = gap_s - self._mean
        self._mean += delta / self._count
        self._squares += delta * (gap_s - self._mean)

    def variation(self) -> float | None:
        if self._count < 2 or self._mean == 0:
            return None
        return sqrt(self._squares / self._count) / self._mean


class _Windows:
    """Counts requests in consecutive windows from time 0, without storing the windows."""

    def __init__(self, width_s: float) -> None:
        self._width_s = width_s
        self._window = 0
        self._count = 0
        self._peak = 0
        self._full = 0
        self._sum = 0
        self._squares = 0

    def add(self, time_s: float) -> None:
        window = int(time_s // self._width_s)
        if window != self._window:
            self._full += window - self._window  # the window that ends, and empty ones after it
            self._sum += self._count
            self._squares += self._count**2
            self._window, self._count = window, 0
        self._count += 1
        self._peak = max(self._peak, self._count)

    def peak(self, count: int, duration_s: float) -> float | None:
        """Return the highest rate. The last window is cut, so the mean may be above it."""
        if duration_s < self._width_s:
            return None
        return max(self._peak / self._width_s, count / duration_s)

    def dispersion(self) -> float | None:
        """Return variance / mean over full windows, which leaves out the last window."""
        if self._full < 2 or not self._sum:
            return None
        mean = self._sum / self._full
        return (self._squares / self._full - mean**2) / mean


class _Profile:
    """Counts requests in 1,024 windows, whose width doubles when the trace is longer."""

    def __init__(self) -> None:
        self._width_s = 1e-3
        self._counts = [0] * _WINDOWS

    def add(self, time_s: float) -> None:
        while time_s >= self._width_s * _WINDOWS:
            pairs = zip(self._counts[::2], self._counts[1::2], strict=True)
            self._counts = [a + b for a, b in pairs] + [0] * (_WINDOWS // 2)
            self._width_s *= 2
        self._counts[int(time_s / self._width_s)] += 1

    def extremes(self, duration_s: float) -> tuple[RateSpan | None, RateSpan | None, bool | None]:
        """Return the slowest tenth, the fastest tenth, and True if both are near the mean."""
        total = sum(self._counts)
        if not duration_s or total < _TENTHS * _ENOUGH:
            return None, None, None
        tenth_s = duration_s / _TENTHS
        spans = []
        for index in range(_TENTHS):
            # A window on an edge belongs to both sides in part.
            count = self._until((index + 1) * tenth_s) - self._until(index * tenth_s)
            spans.append(RateSpan(index * tenth_s, (index + 1) * tenth_s, count / tenth_s))
        slowest = min(spans, key=lambda span: span.rate_per_s)
        fastest = max(spans, key=lambda span: span.rate_per_s)
        mean = total / duration_s
        steady = slowest.rate_per_s >= mean / 2 and fastest.rate_per_s <= mean * 2
        return slowest, fastest, steady

    def _until(self, time_s: float) -> float:
        whole, part = divmod(time_s / self._width_s, 1.0)
        at = min(int(whole), _WINDOWS)
        return sum(self._counts[:at]) + (self._counts[at] * part if at < _WINDOWS else 0.0)
