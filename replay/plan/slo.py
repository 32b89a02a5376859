"""Read latency targets as the user states them, and judge whether a request met them. Pure.

A request meets its targets if each target that applies to it holds, with times counted from the
moment it was due. A target on a quantity that is undefined for the request (TPOT of a one-token
answer) does not apply. A request without a first token misses its TTFT target. The target
`session.e2e` is one of the whole task (`tasks.py`): all its requests meet it, or none does.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from forebay.traces.ground.buckets import LengthBucket
from forebay.traces.ground.errors import InputError

METRICS = ("ttft", "e2e", "tpot", "stall")
SESSION = "session.e2e"  # a metric of tasks; `session` is no bucket
_UNDEFINED_MISSES = ("ttft", "e2e")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|m)?")
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """A target: `metric` of requests in `bucket` (None: all) is at most `limit_s` seconds."""

    bucket: str | None
    metric: str
    limit_s: float

    def __str__(self) -> str:
        return f"{f'{self.bucket}.' if self.bucket else ''}{self.metric}={self.limit_s:g}s"


def parse_slos(text: str, buckets: Sequence[str]) -> tuple[Slo, ...]:
    """Read `chat.ttft=2s,document.ttft=15s,tpot=100ms` (InputError: another form)."""
    slos: list[Slo] = []
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        bucket, dot, metric = name.rpartition(".")
        match = _DURATION.fullmatch(value.strip())
        if not equals or match is None:
            raise InputError(f"--slo: {part.strip()!r} is not METRIC=TIME; e.g. chat.ttft=2s")
        if name == SESSION:
            bucket, dot, metric = "", "", SESSION
        elif metric not in METRICS:
            raise InputError(f"--slo: no metric {metric!r}; one of: {', '.join(METRICS)}")
        if dot and bucket not in buckets:
            raise InputError(f"--slo: no bucket {bucket!r}; one of: {', '.join(buckets)}")
        limit_s = float(match[1]) * _UNIT_S[match[2]]
        if limit_s <= 0:
            raise InputError(f"--slo: {part.strip()!r} cannot be met; give a time above 0")
        slos.append(Slo(bucket or None, metric, limit_s))
    return tuple(slos)


def default_slos(buckets: Sequence[LengthBucket]) -> tuple[Slo, ...]:
    """Return the targets of the buckets."""
    return tuple(Slo(b.name, "ttft", b.target_s) for b in buckets if b.target_s < inf)


def session_limit_s(slos: Sequence[Slo]) -> float:
    """Return the strictest target of a task, in seconds, or inf without a target."""
    return min((slo.limit_s for slo in slos if slo.metric == SESSION), default=inf)


def check_sessions(slos: Sequence[Slo], has_sessions: bool) -> None:
    """Raise InputError for a target of tasks if no request of the trace has a session."""
    if not has_sessions and session_limit_s(slos) < inf:
        raise InputError(
            f"--slo {SESSION}: no request of the trace has a session; name sessions in the trace, "
            "or leave this target out"
        )


def meets(slos: Sequence[Slo], bucket: str, values_s: Mapping[str, float | None]) -> bool:
    """True if a completed request met every target except its task's.

    Args:
        values_s: seconds by metric; None where undefined.
    """
    for slo in slos:
        if slo.metric == SESSION or slo.bucket not in (None, bucket):
            continue
        value = values_s[slo.metric]
        if value is None:
            if slo.metric in _UNDEFINED_MISSES:
                return False
        elif value > slo.limit_s:
            return False
    return True
