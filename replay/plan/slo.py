"""Read latency targets as the user states them, and judge whether a request met them. Pure.

A request meets its targets if each target that applies to it holds, with times counted from the
moment it was due. A target on a quantity that is undefined for the request (TPOT of a one-token
answer) does not apply. A request without a first token misses its TTFT target.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.traces.errors import InputError

METRICS = ("ttft", "e2e", "tpot", "stall")
_UNDEFINED_MISSES = ("ttft", "e2e")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|m)?")
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0}
DEFAULT_SLO_S = {"chat": 2.0, "document": 15.0}  # ttft, for buckets of these names


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
        if metric not in METRICS:
            raise InputError(f"--slo: no metric {metric!r}; one of: {', '.join(METRICS)}")
        if dot and bucket not in buckets:
            raise InputError(f"--slo: no bucket {bucket!r}; one of: {', '.join(buckets)}")
        limit_s = float(match[1]) * _UNIT_S[match[2]]
        if limit_s <= 0:
            raise InputError(f"--slo: {part.strip()!r} cannot be met; give a time above 0")
        slos.append(Slo(bucket or None, metric, limit_s))
    return tuple(slos)


def default_slos(buckets: Sequence[str]) -> tuple[Slo, ...]:
    return tuple(
        Slo(name, "ttft", DEFAULT_SLO_S[name]) for name in buckets if name in DEFAULT_SLO_S
    )


def meets(slos: Sequence[Slo], bucket: str, values_s: Mapping[str, float | None]) -> bool:
    """True if a completed request met every target. `values_s` maps metrics to seconds."""
    for slo in slos:
        if slo.bucket is not None and slo.bucket != bucket:
            continue
        value = values_s[slo.metric]
        if value is None:
            if slo.metric in _UNDEFINED_MISSES:
                return False
        elif value > slo.limit_s:
            return False
    return True
