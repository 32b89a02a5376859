"""Reports to operators: a log line a minute, and metrics where vLLM passes them on.

The engine is a process of its own. vLLM's API server shows the metrics of other processes if the
environment variable PROMETHEUS_MULTIPROC_DIR names an empty folder.
"""

import os
from typing import Any, Final

from vllm.logger import init_logger

LOG_EVERY_S: Final = 60.0
SHOW_EVERY_S: Final = 1.0
logger = init_logger("vllm.forebay_scheduler")


class Reports:
    """Counts of one engine.

    Attributes:
        faults: number of faults of the decision. vLLM plans such a step itself.
    """

    def __init__(self, engine: int, pause_s: float) -> None:
        self.faults = 0
        self._told_at = self._shown_at = self._longest_s = 0.0
        self._steps = 0
        self._metrics: dict[str, Any] = {}
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            self._metrics = _metrics(str(engine))
        logger.info("Forebay schedules this engine: pauses of at most %g s", pause_s)

    def fault(self, what: str) -> None:
        """Count a fault. The first is logged with its cause."""
        self.faults += 1
        if self.faults == 1:
            logger.exception("Forebay: %s", what)

    def step(self, now: float, seconds: float, bound_s: float, passed_over: int) -> None:
        """Report a step that took `seconds`.

        Args:
            bound_s: how long it was allowed to take.
            passed_over: how many requests went before a long one without room, so far.
        """
        self._steps += 1
        self._longest_s = max(self._longest_s, seconds)
        if self._metrics and now - self._shown_at >= SHOW_EVERY_S:
            self._shown_at = now
            values = (bound_s, self._longest_s, passed_over, self.faults)
            for metric, value in zip(self._metrics.values(), values, strict=True):
                metric.set(value)
        # The first minute begins with the first step.
        self._told_at = self._told_at or now
        if now - self._told_at >= LOG_EVERY_S:
            logger.info(
                "Forebay: %d steps, the longest %.3f s, bound %.3f s; %d requests passed a long one"
                " without room, %d faults of the decision",
                self._steps, self._longest_s, bound_s, passed_over, self.faults,
            )  # fmt: skip
            self._told_at, self._longest_s, self._steps = now, 0.0, 0


def _metrics(engine: str) -> dict[str, Any]:
    """Make the gauges. Counters are gauges here, since they are set and not incremented."""
    from prometheus_client import Gauge

    return {
        name: Gauge(
            f"forebay_scheduler_{name}", what, ["engine"], multiprocess_mode="mostrecent"
        ).labels(engine)
        for name, what in (
            ("step_bound_seconds", "How long a step may take."),
            ("longest_step_seconds", "The longest step of the last minute."),
            ("passed_over", "Requests that went before a long one without room."),
            ("faults", "Faults of the decision. vLLM plans such a step itself."),
        )
    }
