"""Print the schedule of a replay as CSV or JSON without sending anything: `--print-schedule`.

A turn that waits for answers has no due time beforehand. Its line has the requests that it waits
for, and the time from the last answer until it is due.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import orjson

from forebay.replay.plan.due_times import plan_schedule
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.source import TraceSource


class ScheduleLine(NamedTuple):
    """One request. `due_s` is None if it is due `think_s` after the answers it waits for."""

    due_s: float | None
    id: str
    waits_for: tuple[str, ...] = ()
    think_s: float | None = None


def schedule_of(options: ReplayOptions) -> Iterator[ScheduleLine]:
    """Return the requests in order (InputError, at once: options that a replay would refuse)."""
    options.check()
    # Plan like a replay, so that its errors appear here too.
    source = TraceSource(
        options.trace,
        format_name=options.format_name,
        skip_bad=options.skip_bad,
        max_model_len=options.max_model_len,
        too_long=options.too_long,
    )
    scan = source.scan()
    schedule, agenda = plan_schedule(options, source, scan)
    source.check(scan, len(scan.arrivals_s) if agenda else schedule.count)
    times = iter(schedule.times_s)
    closed = bool(schedule.arrivals.closed)

    def lines() -> Iterator[ScheduleLine]:
        for index, row in enumerate(source.requests()):
            if agenda is not None and index in agenda.turns:
                names = tuple(filter(None, (row.parent, *row.waits_for)))
                yield ScheduleLine(None, row.id, names, row.think_s)
                continue
            due_s = next(times, None)
            if due_s is None and not closed:
                if agenda is None:
                    return
                continue  # beyond --duration, like the turns that wait for it
            yield ScheduleLine(due_s, row.id)

    return lines()


def csv_lines(schedule: Iterable[ScheduleLine]) -> Iterator[str]:
    yield ",".join(ScheduleLine._fields) + "\n"
    for line in schedule:
        due, think = (
            "" if time_s is None else f"{time_s:.6f}" for time_s in (line.due_s, line.think_s)
        )
        yield f"{due},{_quoted(line.id)},{_quoted(' '.join(line.waits_for))},{think}\n"


def json_lines(schedule: Iterable[ScheduleLine]) -> Iterator[str]:
    """Yield one array of objects, an object on each line."""
    before = "[\n"
    for line in schedule:
        yield f"{before}{orjson.dumps(line._asdict()).decode()}"
        before = ",\n"
    yield "\n]\n" if before == ",\n" else "[]\n"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"\n\r') else text
