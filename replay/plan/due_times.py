"""Plan the due times of a replay, for traces with and without turns that wait for answers."""

from collections.abc import Sequence

from forebay.replay.plan.agenda import Agenda, link
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.schedule import Schedule, make_schedule
from forebay.replay.plan.source import Scan, TraceSource


def plan_schedule(
    options: ReplayOptions, source: TraceSource, scan: Scan
) -> tuple[Schedule, Agenda | None]:
    """Plan the due times of all requests, or of the roots of a trace whose turns wait.

    A rate counts all requests. Think times stay the same.

    Raises:
        InputError: a wrong option, or a trace that cannot be linked.
    """
    if not (scan.linked and options.turns == "wait"):
        return _schedule(options, scan.arrivals_s, options.rate_per_s), None
    agenda = link(list(source.requests()), source.name, lenient=source.may_lack_rows)
    times = [agenda.rows[index].arrival_s for index in agenda.roots]
    rate = options.rate_per_s
    if rate is not None:
        rate *= len(agenda.roots) / len(agenda.rows)
    schedule = _schedule(options, times, rate)
    if options.speed is not None:
        agenda.pace = options.speed
    elif rate is not None and options.arrivals.kind == "trace":
        agenda.pace = (times[-1] - times[0]) * rate / (len(times) - 1)
    return schedule, agenda


def _schedule(options: ReplayOptions, times_s: Sequence[float], rate: float | None) -> Schedule:
    return make_schedule(
        times_s,
        options.arrivals,
        rate_per_s=rate,
        speed=options.speed,
        duration_s=options.duration_s,
        seed=options.seed,
    )
