"""Print the schedule of a replay as CSV without sending anything: `--print-schedule`.

A turn that waits for answers has no time of its own beforehand. Its line says which requests it
waits for, and how long after the last answer it is due.
"""

from collections.abc import Iterator

from forebay.replay.due_times import plan_schedule
from forebay.replay.options import ReplayOptions
from forebay.replay.source import TraceSource


def schedule_lines(options: ReplayOptions) -> Iterator[str]:
    """Yield the lines; raises InputError for what a replay would not accept."""
    options.check()
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
    yield "due_s,id,waits_for,think_s\n"
    times = iter(schedule.times_s)
    closed = bool(schedule.arrivals.closed)
    for index, row in enumerate(source.requests()):
        if agenda is not None and index in agenda.turns:
            names = " ".join(filter(None, (row.parent, *row.waits_for)))
            think = "" if row.think_s is None else f"{row.think_s:.6f}"
            yield f",{_quoted(row.id)},{_quoted(names)},{think}\n"
            continue
        due_s = next(times, None)
        if due_s is None and not closed:
            if agenda is None:
                return
            continue  # beyond --duration, as are the turns that wait for it
        yield f"{'' if due_s is None else f'{due_s:.6f}'},{_quoted(row.id)},,\n"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"\n\r') else text
