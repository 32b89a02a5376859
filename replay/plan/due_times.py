"""Plan the due times of a replay, for traces with and without turns that wait for answers."""

from collections.abc import Sequence

from forebay.replay.plan.agenda import Agenda, link
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.schedule import Arrivals, Schedule, make_schedule
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
    rate = root_rate(agenda, options.rate_per_s)
    schedule = _schedule(options, times, rate)
    agenda.pace = root_pace(agenda, options.arrivals, rate, options.speed)
    return schedule, agenda


def root_rate(agenda: Agenda, rate_per_s: float | None) -> float | None:
    """Return the rate of the roots at which all requests have this rate."""
    return None if rate_per_s is None else rate_per_s * len(agenda.roots) / len(agenda.rows)


def root_pace(
    agenda: Agenda, arrivals: Arrivals, rate_per_s: float | None, speed: float | None
) -> float:
    """Return the rate of the roots as a multiple of the trace's own, 1.0 if their gaps are new."""
    if speed is not None:
        return speed
    if rate_per_s is None or arrivals.kind != "trace":
        return 1.0
    first_s, last_s = (agenda.rows[agenda.roots[place]].arrival_s for place in (0, -1))
    return (last_s - first_s) * rate_per_s / (len(agenda.roots) - 1)


def _schedule(options: ReplayOptions, times_s: Sequence[float], rate: float | None) -> Schedule:
    return make_schedule(
        times_s,
        options.arrivals,
        rate_per_s=rate,
        speed=options.speed,
        duration_s=options.duration_s,
        seed=options.seed,
    )
