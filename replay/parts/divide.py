"""Divide a replay over processes: which rows each one sends, and when. Pure but for the callbacks.

The schedule is made for the whole trace and then divided, so requests are due at the same times
as with one process. A session stays whole, with all that wait for its answers.
"""

import base64
import pickle
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from forebay.replay.clock.clock import Clock
from forebay.replay.plan.agenda import link
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.plan import ReplayPlan
from forebay.replay.plan.target import Served
from forebay.replay.results.recorder import Live
from forebay.traces.ground.schema import TraceRequest


@dataclass(frozen=True, slots=True)
class PartJob:
    """The part of a replay for a single process.

    Attributes:
        number: number of this process, from 0.
        count: number of processes.
        run_id: prefix of request ids, a different one in each process.
        reports: True if it sends live figures.
    """

    options: ReplayOptions
    number: int
    count: int
    served: Served
    run_id: str
    reports: bool

    def line(self) -> str:
        """Return the job as the process reads it."""
        return base64.b64encode(pickle.dumps(self)).decode("ascii")


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a replay that has several.

    Attributes:
        start: sets the clock to the start that all processes have in common, and waits for it.
        report: shows the live figures until cancelled.
    """

    job: PartJob
    start: Callable[[Clock], Awaitable[None]]
    report: Callable[[Live, ReplayPlan, Clock], Coroutine[Any, Any, None]]

    def narrow(self, plan: ReplayPlan) -> ReplayPlan:
        """Return this process's part of the whole. Its source then reads only its rows."""
        options, source, schedule, agenda = plan.options, plan.source, plan.schedule, plan.agenda
        parts, number = divide(source.requests(), self.job.count), self.job.number
        source.keep(parts, number)
        rows = range(len(parts)) if agenda is None else agenda.roots
        mine = [parts[row] == number for row in rows]
        arrivals = schedule.arrivals
        if arrivals.closed:
            arrivals = replace(arrivals, parameter=float(self._share(arrivals.closed)))
        due = zip(schedule.times_s, mine, strict=False)
        narrowed = replace(
            schedule,
            arrivals=arrivals,
            count=sum(mine[: schedule.count]),
            times_s=array("d", (at_s for at_s, own in due if own)),
        )
        if agenda is not None:
            pace = agenda.pace
            agenda = link(list(source.requests()), source.name, lenient=source.may_lack_rows)
            agenda.pace = pace
        options = replace(options, max_in_flight=self._share(options.max_in_flight))
        run_id = self.job.run_id
        return replace(plan, options=options, schedule=narrowed, agenda=agenda, run_id=run_id)

    def _share(self, whole: int) -> int:
        return whole // self.job.count + (self.job.number < whole % self.job.count)


def divide(rows: Iterable[TraceRequest], count: int) -> bytearray:
    """Return the number of the process of each row, equal in all processes.

    Rows with the same session, or with a link between their sessions, have the same one.
    """
    group_of_row: list[str] = []
    group_of_id: dict[str, str] = {}
    joined: dict[str, str] = {}

    def leader(group: str) -> str:
        while group in joined:
            group = joined[group]
        return group

    for row in rows:
        group = f"row {row.id}" if row.session is None else f"session {row.session}"
        group_of_row.append(group)
        for before in (row.parent, *row.waits_for):
            ours, theirs = leader(group), leader(group_of_id.get(before or "", group))
            if ours != theirs:
                joined[ours] = theirs
        group_of_id[row.id] = group
    hashes = (blake2b(leader(group).encode(), digest_size=8).digest() for group in group_of_row)
    return bytearray(int.from_bytes(each, "big") % count for each in hashes)
