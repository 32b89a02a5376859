"""Keep the last 15 minutes for the live page: a sample every 5 seconds, in bounded memory.

A sample counts requests, rejections and times to first token by length bucket, tenant and model.
Times are counted in classes 10 % wide, so that samples can be added up. A page that is opened
after an alert shows what came before it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any

from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.telemetry.logs.rejection_log import REASONS
from forebay.proxy.telemetry.record import CLIENT_GONE, RequestRecord

EVERY_S = 5.0
KEPT_S = 900.0
MINUTE_S = 60.0
MOST_NAMES = 20
"""Tenants, and models, that one sample counts by name. The others count as one."""
OTHERS = "others"
LEAST_S, MOST_S, WIDER = 0.001, 1_000.0, 1.1
"""Bounds of the first and the last class of times, and how much wider each is than the last."""


@dataclass(slots=True)
class Tally:
    """Counts of one sample for one bucket, tenant or model.

    Attributes:
        left: requests whose clients left before the first token.
        failed: requests that got another error than a rejection.
        longest_s: the longest time to first token.
        first_tokens: numbers of first tokens by class of their times.
    """

    requests: int = 0
    rejected: int = 0
    left: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    longest_s: float = 0.0
    first_tokens: Counter[int] = field(default_factory=Counter)

    def first_token(self, ttft_s: float) -> None:
        self.longest_s = max(self.longest_s, ttft_s)
        within_s = min(max(ttft_s, LEAST_S), MOST_S)
        self.first_tokens[int(log(within_s / LEAST_S) / log(WIDER))] += 1

    def add(self, other: "Tally") -> None:
        self.requests += other.requests
        self.rejected += other.rejected
        self.left += other.left
        self.failed += other.failed
        self.longest_s = max(self.longest_s, other.longest_s)
        self.prompt_tokens += other.prompt_tokens
        self.first_tokens.update(other.first_tokens)

    def ttft_s(self, share: float) -> float | None:
        """Return a quantile of the times to first token, within 5 %, or None without any.

        It is never above the longest time.
        """
        rank, below = share * self.first_tokens.total(), 0
        for at, count in sorted(self.first_tokens.items()):
            below += count
            if below >= rank:
                return round(min(LEAST_S * float(WIDER ** (at + 0.5)), self.longest_s), 4)
        return None

    def fields(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "rejected": self.rejected,
            "left": self.left,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "ttft_p50_s": self.ttft_s(0.5),
            "ttft_p95_s": self.ttft_s(0.95),
            "ttft_p99_s": self.ttft_s(0.99),
        }


@dataclass(slots=True)
class Sample:
    """The tallies of some seconds. A name beyond the first `MOST_NAMES` counts as `OTHERS`."""

    began_at: float
    buckets: dict[str, Tally] = field(default_factory=dict)
    tenants: dict[str, Tally] = field(default_factory=dict)
    models: dict[str, Tally] = field(default_factory=dict)

    def of(self, record: RequestRecord) -> list[Tally]:
        """Return the tallies that count a request."""
        tallies = []
        if record.bucket:
            tallies.append(_tally(self.buckets, record.bucket))
        if record.tenant:
            tallies.append(_tally(self.tenants, record.tenant))
        if record.model:
            tallies.append(_tally(self.models, record.model))
        return tallies


def _tally(tallies: dict[str, Tally], name: str) -> Tally:
    tally = tallies.get(name)
    if tally is None:
        name = name if len(tallies) < MOST_NAMES else OTHERS
        tally = tallies.setdefault(name, Tally())
    return tally


class LiveHistory:
    """The samples of one process, oldest first, and the sample that is being counted."""

    def __init__(self, shaper: Shaper, clock: Callable[[], float]) -> None:
        self._shaper = shaper
        self._clock = clock
        self._now = Sample(clock())
        self._minute: deque[Sample] = deque(maxlen=int(MINUTE_S / EVERY_S))
        self._kept: deque[tuple[float, dict[str, Any]]] = deque(maxlen=int(KEPT_S / EVERY_S))

    def first_token(self, record: RequestRecord, ttft_s: float) -> None:
        """The first event of a request has come."""
        for tally in self._now.of(record):
            tally.first_token(ttft_s)

    def finished(self, record: RequestRecord, status: int) -> None:
        """A request has been answered, or its client has left (CLIENT_GONE)."""
        rejected = record.reason in REASONS
        left = status == CLIENT_GONE and record.first_token_at is None
        failed = 400 <= status != CLIENT_GONE and not rejected
        tokens = record.prompt_tokens or record.estimated_tokens
        if not tokens and record.request is not None:
            tokens = record.request.prompt_tokens  # as estimated on arrival
        for tally in self._now.of(record):
            tally.requests += 1
            tally.prompt_tokens += tokens
            if rejected or left or failed:
                tally.rejected += rejected
                tally.left += left
                tally.failed += failed

    def take(self, now: float) -> None:
        """End the sample that is being counted, and begin the next one."""
        buckets = {name: tally.fields() for name, tally in self._now.buckets.items()}
        self._kept.append((now, {"buckets": buckets, **self._state()}))
        self._minute.append(self._now)
        self._now = Sample(now)

    def fields(self) -> dict[str, Any]:
        """Return the JSON of `/history`, but for the events."""
        now = self._clock()
        minute = [*self._minute, self._now]
        return {
            "every_s": EVERY_S,
            "kept_s": KEPT_S,
            "samples": [{"age_s": round(now - at, 1), **sample} for at, sample in self._kept],
            "minute": {
                "seconds": round(now - minute[0].began_at, 1),
                "buckets": _added_up(sample.buckets for sample in minute),
                "tenants": _added_up(sample.tenants for sample in minute),
                "models": _added_up(sample.models for sample in minute),
            },
        }

    def _state(self) -> dict[str, Any]:
        shaper = self._shaper
        return {
            "waiting": {bucket: shaper.queued(bucket) for bucket in shaper.buckets},
            "backends": {name: _backend(backend) for name, backend in shaper.backends.items()},
        }


def _backend(backend: Backend) -> dict[str, Any]:
    sized = backend.kv_tokens not in (0, float("inf"))
    return {
        "up": backend.up,
        "running": len(backend.in_flight) + backend.passing,
        "kv_share": round(backend.kv.tokens / backend.kv_tokens, 3) if sized else None,
    }


def _added_up(parts: Iterable[Mapping[str, Tally]]) -> list[dict[str, Any]]:
    """Return the sums by name, those with most requests first."""
    sums: dict[str, Tally] = {}
    for part in parts:
        for name, tally in part.items():
            _tally(sums, name).add(tally)
    ordered = sorted(sums.items(), key=lambda pair: (-pair[1].requests, pair[0]))
    return [{"name": name, **tally.fields()} for name, tally in ordered]
