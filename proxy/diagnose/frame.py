"""Compute one frame of `forebay top` from two readings of the admin port."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.proxy.diagnose.scene import MetricSample, Scene

REASONS = "forebay_waiting_requests"
AGE = "forebay_snapshot_age_seconds"


@dataclass(frozen=True, slots=True)
class TimedScene:
    """The answers of one moment.

    Attributes:
        at_s: on any clock.
        minute: the requests of the last minute, from `/history`.
    """

    at_s: float
    scene: Scene
    minute: Mapping[str, Any] = field(default_factory=dict)


def earlier(now: TimedScene, samples: list[MetricSample]) -> TimedScene | None:
    """Return the reading in `/metrics?ago=`, or None if the proxy is younger."""
    then = Scene(now.scene.status, [], samples)
    age_s = max((sample.value for sample in then.matching(AGE, {})), default=0.0)
    return TimedScene(now.at_s - age_s, then) if age_s else None


@dataclass(frozen=True, slots=True)
class BackendLine:
    """One backend. `running` and `waiting` are numbers of requests."""

    name: str
    state: str
    running: int
    slots: int
    prefills: int
    backlog_s: float
    waiting: int
    kv_share: float | None
    prefill_10k_s: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class BucketLine:
    """One length bucket, with rates between the two readings.

    `left` and the times to first token are of the last minute. A request whose client left before
    its first token has no such time.
    """

    name: str
    waiting: int
    requests_per_s: float
    rejected_per_s: float
    left: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None


@dataclass(frozen=True, slots=True)
class NameLine:
    """One model or tenant in the last minute.

    Attributes:
        share: its part of the minute's requests.
        left: requests whose clients left before the first token.
        failed: requests that got another error than a rejection.
    """

    name: str
    requests_per_s: float
    share: float
    prompt_tokens_per_s: float
    rejected_per_s: float
    left: int
    failed: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None


@dataclass(frozen=True, slots=True)
class Frame:
    """One moment as it is shown.

    Attributes:
        over_s: the time that rates cover. Without an earlier reading, all time since the start.
        waits: waiting requests as (number, bucket, backend, reason).
    """

    ready: bool
    draining: bool
    observing: bool
    version: str
    uptime_s: float
    active: int
    over_s: float
    shedding: int
    workers: int
    backends: list[BackendLine]
    buckets: list[BucketLine]
    waits: list[tuple[int, str, str, str]]
    models: list[NameLine]
    tenants: list[NameLine]


def frame_of(now: TimedScene, before: TimedScene | None = None) -> Frame:
    """Return the frame of a reading, with rates since `before` or since the start."""
    statuses = now.scene.statuses()
    uptime_s = max((status["uptime_s"] for status in statuses), default=0.0)
    over_s = now.at_s - before.at_s if before else uptime_s
    change = Change(now.scene, before.scene if before else None, max(over_s, 1e-9))
    return Frame(
        ready=bool(now.scene.status["ready"]),
        draining=bool(now.scene.status["draining"]),
        observing=any(status.get("mode") == "observe" for status in statuses),
        version=statuses[0]["versions"]["forebay"] if statuses else "",
        uptime_s=uptime_s,
        active=sum(status["active_requests"] for status in statuses),
        over_s=over_s,
        shedding=max((status["shedding_classes"] for status in statuses), default=0),
        workers=len(now.scene.status.get("workers", ())),
        backends=[_backend(name, now.scene, change) for name in now.scene.backends()],
        buckets=_buckets(now, change),
        waits=_waits(now.scene),
        models=_named(now.minute, "models"),
        tenants=_named(now.minute, "tenants"),
    )


class Change:
    """The growth of counters between two readings."""

    def __init__(self, now: Scene, before: Scene | None, over_s: float) -> None:
        self._now = now
        self._before = before
        self._over_s = over_s

    def per_s(self, name: str, **labels: str) -> float:
        return self.gain(name, **labels) / self._over_s

    def gain(self, name: str, **labels: str) -> float:
        """Return the growth, or the whole value if the proxy was restarted in between."""
        total = self._now.total(name, **labels)
        before = self._before.total(name, **labels) if self._before else 0.0
        return total - before if total >= before else total


def _backend(name: str, scene: Scene, change: Change) -> BackendLine:
    mine = [b for status in scene.statuses() for b in status["backends"] if b["name"] == name]
    backend = scene.backends()[name]
    # A backend that is being removed has no state.
    state = next((s for b in mine if (s := b.get("state", "draining")) != "up"), "up")
    kv_tokens = backend["kv_tokens"]
    return BackendLine(
        name=name,
        state="draining" if backend["draining"] else state,
        running=scene.sent_now(name),
        slots=backend["max_concurrency"],
        prefills=sum(b["prefills"] for b in mine),
        backlog_s=max(b["backlog_s"] for b in mine),
        waiting=sum(sum(b["queued"].values()) for b in mine),
        kv_share=sum(b["kv_reserved_tokens"] for b in mine) / kv_tokens if kv_tokens else None,
        prefill_10k_s=backend["prefill_cost"]["seconds_10k_tokens"],
        requests_per_s=change.per_s("forebay_backend_requests_total", backend=name),
    )


def _buckets(now: TimedScene, change: Change) -> list[BucketLine]:
    waiting: dict[str, int] = {}
    for status in now.scene.statuses():
        for name, count in status["queued"].items():
            waiting[name] = waiting.get(name, 0) + count
    last = {entry["name"]: entry for entry in now.minute.get("buckets", ())}
    return [
        BucketLine(
            name=name,
            waiting=count,
            requests_per_s=change.per_s("forebay_responses_total", bucket=name),
            rejected_per_s=change.per_s("forebay_rejects_total", bucket=name),
            left=last[name]["left"] if name in last else 0,
            ttft_p50_s=last[name]["ttft_p50_s"] if name in last else None,
            ttft_p99_s=last[name]["ttft_p99_s"] if name in last else None,
        )
        for name, count in waiting.items()
    ]


def _named(minute: Mapping[str, Any], kind: str) -> list[NameLine]:
    if not minute:
        return []
    seconds = max(1.0, minute["seconds"])
    total = max(1, sum(entry["requests"] for entry in minute["buckets"]))
    return [
        NameLine(
            name=entry["name"],
            requests_per_s=entry["requests"] / seconds,
            share=entry["requests"] / total,
            prompt_tokens_per_s=entry["prompt_tokens"] / seconds,
            rejected_per_s=entry["rejected"] / seconds,
            left=entry["left"],
            failed=entry["failed"],
            ttft_p50_s=entry["ttft_p50_s"],
            ttft_p95_s=entry["ttft_p95_s"],
        )
        for entry in minute[kind]
    ]


def _waits(scene: Scene) -> list[tuple[int, str, str, str]]:
    counts: dict[tuple[str, str, str], float] = {}
    for sample in scene.matching(REASONS, {}):
        key = sample.labels["bucket"], sample.labels["backend"], sample.labels["reason"]
        counts[key] = counts.get(key, 0.0) + sample.value
    waits = [(round(count), *key) for key, count in counts.items() if count]
    return sorted(waits, key=lambda wait: (-wait[0], wait[1:]))
