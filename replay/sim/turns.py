"""Let turns of a trace wait for the answers before them, in virtual time.

`agenda` has the rules, as for `forebay replay`. A row's `arrival_s` is the time at
which it is due if no answer comes later than that.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from forebay.replay.plan.agenda import Agenda, link
from forebay.traces.ground.schema import TraceRequest


class WaitingTurns:
    """The requests of one simulation, each due at its time or after the answers it waits for.

    Args:
        rows: each after those it waits for. It does not wait for a row that is not there.
        until_s: no request that is due at or after this second arrives.
    """

    def __init__(self, rows: Sequence[TraceRequest], *, until_s: float = inf) -> None:
        self._rows = rows
        self._until_s = until_s
        self._agenda: Agenda = link(rows, "the trace", lenient=True)
        self._places = {row.id: place for place, row in enumerate(rows)}
        self._due: list[tuple[float, int]] = []
        for root in self._agenda.roots:
            due_s = rows[root].arrival_s
            self._agenda.start(root, due_s)
            heappush(self._due, (due_s, root))

    def next_at(self) -> float:
        """Return when the next known request is due, inf if none is."""
        if self._due and self._due[0][0] < self._until_s:
            return self._due[0][0]
        return inf

    def take(self) -> TraceRequest:
        """Return the request of `next_at`, which arrives now."""
        due_s, place = heappop(self._due)
        row = self._rows[place]
        return row if row.arrival_s == due_s else replace(row, arrival_s=due_s)

    def ended(self, request_id: str, now: float) -> None:
        """Record the end of an answer, or a rejection."""
        for turn in self._agenda.ended(self._places[request_id], now):
            heappush(self._due, turn)
