"""Plan turns that wait for answers: which request is due when, as answers arrive. Pure.

A request without `parent` and `waits_for` is a root: the schedule sets its due time. Any other
request is due `think_s` after the last of the answers it waits for. Without `think_s` it keeps its
distance from its root in the trace, but is due after these answers. A turn whose predecessor was
rejected or failed is still sent: a service must not look better because it answers fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from forebay.replay.plan.schedule import Arrivals
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest


@dataclass(slots=True)
class Turn:
    """A request that waits for answers.

    Attributes:
        root: index of the request whose due time the schedule sets.
        missing: number of answers that it still waits for.
        after_s: end of the last answer so far.
    """

    root: int
    missing: int
    after_s: float = -inf


@dataclass(slots=True)
class Agenda:
    """The links of a trace. Use `link` to make one.

    Attributes:
        rows: the whole trace.
        roots: indices of requests that wait for no answer, in order of arrival.
        turns: the other requests, by index.
        pace: factor of the rate of the roots in the trace. Think times stay the same.
    """

    rows: Sequence[TraceRequest]
    roots: list[int] = field(default_factory=list)
    turns: dict[int, Turn] = field(default_factory=dict)
    pace: float = 1.0
    _next: dict[int, list[int]] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)
    _root_due_s: dict[int, float] = field(default_factory=dict)

    def start(self, root: int, due_s: float) -> None:
        """Record the due time of a root."""
        self._root_due_s[root] = due_s

    def followers(self, index: int) -> Sequence[int]:
        """Return the turns that wait for this answer, among others."""
        return self._next.get(index, ())

    def ended(self, index: int, at_s: float) -> list[tuple[float, int]]:
        """Record the end of an answer, and return the turns that are due now, with their times."""
        due = []
        for follower in self._next.get(index, ()):
            turn = self.turns[follower]
            turn.missing -= 1
            turn.after_s = max(turn.after_s, at_s)
            if not turn.missing:
                due.append((self._due_s(follower, turn), follower))
        return due

    def session_over(self, index: int) -> bool:
        """Record that a request has ended. True if it was the last request of its root."""
        root = self.root_of(index)
        self._left[root] -= 1
        return not self._left[root]

    def root_of(self, index: int) -> int:
        turn = self.turns.get(index)
        return index if turn is None else turn.root

    def _due_s(self, index: int, turn: Turn) -> float:
        row = self.rows[index]
        if row.think_s is not None:
            return turn.after_s + row.think_s
        later_s = (row.arrival_s - self.rows[turn.root].arrival_s) / self.pace
        return max(turn.after_s, self._root_due_s[turn.root] + later_s)


def link(rows: Sequence[TraceRequest], name: str, *, lenient: bool = False) -> Agenda:
    """Link the turns of `rows`. `name` is the name of the trace, for messages.

    Args:
        lenient: ignore that a row waits for a row that is not there.

    Raises:
        InputError: a row waits for a request that is not earlier in the trace.
    """
    agenda, places = Agenda(rows), dict[str, int]()
    for index, row in enumerate(rows):
        parents = () if row.parent is None else (row.parent,)
        before = []
        for identity in dict.fromkeys((*parents, *row.waits_for)):
            place = places.get(identity)
            if place is not None:
                before.append(place)
            elif not lenient:
                raise InputError(
                    f"{name}: row {index + 1} (id {row.id!r}) waits for {identity!r}, which is no "
                    "earlier row; sort the rows by arrival, or give --turns trace"
                )
        places[row.id] = index
        if not before:
            agenda.roots.append(index)
            agenda._left[index] = 1
            continue
        root = agenda.root_of(before[0])
        agenda.turns[index] = Turn(root, len(before))
        agenda._left[root] += 1
        for place in before:
            agenda._next.setdefault(place, []).append(index)
    return agenda


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
