"""Replay a trace against one or more targets, from options to a finished run folder.

All errors of the input are found before the first request is sent. Once sending has begun, all
measurements are kept: on Ctrl-C, when a target dies, and when draining takes too long.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from time import time
from typing import Any

from forebay.replay.parts.divide import Part
from forebay.replay.parts.sender import Sender
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.plan import make_plan
from forebay.replay.results.cache_warnings import cache_warnings
from forebay.replay.results.folder import RunFolder, check_folder
from forebay.replay.results.provenance import run_record
from forebay.replay.results.server_metrics import ServerGauges, server_figures
from forebay.replay.results.summary import RunTotals
from forebay.replay.send.drain import Stop


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


async def replay(
    options: ReplayOptions, stop: Stop | None = None, part: Part | None = None
) -> Summary:
    """Run one replay, or one `part` of it.

    Raises InputError for bad input, before it sends or overwrites anything, and for a process of
    several that fails.
    """
    import numpy  # noqa: F401 - bulk recording uses it: import it now, not during the run

    # Find all errors of the input, and plan.
    check_folder(options.out, force=options.force)
    if options.salt is None:  # caches of earlier runs hold none of the prompts
        options = replace(options, salt=token_hex(4))
    plan = await make_plan(options, None if part is None else part.job.served)
    if part is None:
        plan.print_changes()
    else:
        plan = part.narrow(plan)
    # Send and measure.
    async with Sender(plan, part) as sender:
        with RunFolder(
            options.out,
            force=options.force,
            answers=options.keep_answers,
            metrics=bool(options.metrics),
        ) as folder:
            folder.begin(run_record(plan, time(), "killed"))
            totals = RunTotals([bucket.name for bucket in options.buckets], plan.slos)
            measured = await sender.run(folder, totals, stop or Stop())
            # Sum up, and give the files their names.
            ended = measured.ended
            values = totals.summary(
                measured.histograms,
                measured.stopped_s if ended == "interrupted" else plan.window_s(measured.sent),
                closed=bool(plan.schedule.arrivals.closed),
                scale=plan.options.time_scale,
                ended=ended,
                exact=plan.options.lengths == "exact",
            )
            counted = totals.counted_input_tokens
            warm = cache_warnings(plan.source, measured.sent, counted, values)
            gauges = ServerGauges() if folder.metrics is None else folder.metrics.gauges
            values |= {"ended": ended, "warm_caches": bool(warm)} | server_figures(gauges, values)
            values["warnings"] += warm
            record = run_record(plan, measured.started_unix_s, ended) | {
                "nodes": list(measured.nodes)
            }
            folder.commit(record, values)
            return Summary(values, folder.path, ended)
