"""Finish a run: its summary and its record, written with its measurements."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.replay.plan.plan import ReplayPlan
from forebay.replay.results.cache_warnings import cache_warnings
from forebay.replay.results.folder import RunFolder
from forebay.replay.results.merge import Measured
from forebay.replay.results.provenance import run_record
from forebay.replay.results.summary import RunTotals


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished run. `values` is `summary.json`.

    `ended` is "complete", "interrupted", or "drain timeout" if running answers were cancelled.
    """

    values: dict[str, Any]
    folder: Path
    ended: str

    @property
    def interrupted(self) -> bool:
        return self.ended == "interrupted"


def commit(plan: ReplayPlan, folder: RunFolder, totals: RunTotals, measured: Measured) -> Summary:
    """Give the files of `folder` their names, inside the run's event loop."""
    ended = measured.ended
    summary = totals.summary(
        measured.histograms,
        measured.stopped_s if ended == "interrupted" else plan.window_s(measured.sent),
        closed=bool(plan.schedule.arrivals.closed),
        scale=plan.options.time_scale,
        ended=ended,
        exact=plan.options.lengths == "exact",
    )
    summary["ended"] = ended
    counted = totals.counted_input_tokens
    warm = cache_warnings(plan.source, measured.sent, counted, summary)
    summary["warm_caches"] = bool(warm)
    summary["warnings"] += warm
    record = run_record(plan, measured.started_unix_s, ended) | {"nodes": list(measured.nodes)}
    folder.commit(record, summary)
    return Summary(summary, folder.path, ended)
