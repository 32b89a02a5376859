"""Log when rejections begin, once a minute while they go on, and when they are over.

A flood would fill the log if each rejection had a line. So it has a line at its beginning, one a
minute with the numbers, and one at its end.
"""

from collections import Counter
from typing import get_args

from forebay.proxy.core.model import RejectReason
from forebay.proxy.log_events import LogEvent, Say
from forebay.proxy.telemetry.record import RequestRecord

QUIET_S = 30.0  # without a rejection: then they are over
SUMMARY_S = 60.0
REASONS = frozenset(get_args(RejectReason))
MOST_TENANTS = 1_000  # that are counted by name; the others count as one


class RejectionLog:
    """Counts rejections between their beginning and their end."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._began_at: float | None = None
        self._last_at = self._summed_up_at = 0.0
        self._requests = 0
        self._reasons: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()

    def finished(self, record: RequestRecord, now: float) -> None:
        """Count a request that has ended."""
        rejected = record.reason in REASONS
        if rejected and self._began_at is None:
            self._begin(record, now)
        if self._began_at is None:
            return
        self._requests += 1
        if rejected:
            self._last_at = now
            self._reasons[f"{record.reason} in {record.bucket}"] += 1
            counted = record.tenant in self._tenants or len(self._tenants) < MOST_TENANTS
            self._tenants[record.tenant if counted else "others"] += 1

    def tick(self, now: float) -> None:
        """Log that rejections go on or are over. Called some times a minute."""
        if self._began_at is None:
            return
        if now - self._last_at >= QUIET_S:
            lasted_s = self._last_at - self._began_at
            self._say(
                LogEvent.REJECTIONS_OVER,
                f"rejections are over after {lasted_s:.0f} s: {self._counts()}",
            )
            self._began_at = None
        elif now - self._summed_up_at >= SUMMARY_S:
            self._summed_up_at = now
            self._say(LogEvent.REJECTIONS_GO_ON, f"requests are still rejected: {self._counts()}")

    def _begin(self, record: RequestRecord, now: float) -> None:
        self._began_at = self._summed_up_at = now
        self._requests = 0
        self._reasons.clear()
        self._tenants.clear()
        whose = f", the first one of tenant {record.tenant}" if record.tenant else ""
        self._say(
            LogEvent.REJECTIONS_BEGAN,
            f"requests are rejected: {record.reason} in bucket {record.bucket}{whose}",
        )

    def _counts(self) -> str:
        rejected = self._reasons.total()
        reasons = ", ".join(f"{count:,} {name}" for name, count in self._reasons.most_common())
        text = f"{rejected:,} of {self._requests:,} requests ({reasons})"
        tenant, most = self._tenants.most_common(1)[0]
        return f"{text}; {most:,} of tenant {tenant}" if tenant else text
