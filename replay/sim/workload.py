"""Make the requests of a simulation: a trace under a schedule, as the replayer would send it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from forebay.replay.engine.tokenizer import BYTES_PER_TOKEN, chained_hashes
from forebay.replay.plan.agenda import Agenda, link, root_pace, root_rate
from forebay.replay.plan.options import TURNS
from forebay.replay.plan.schedule import TRACE_ARRIVALS, Arrivals, Schedule, make_schedule
from forebay.replay.plan.source import TraceSource
from forebay.replay.sim.turns import WaitingTurns
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.text import shared_text


@dataclass(frozen=True, slots=True)
class SimWorkload:
    """The trace and its pace, with the options of `forebay replay`.

    Attributes:
        trace: a file, or the requests themselves in order of arrival.
        load: rate as a share of the engines' capacity (`capacity`).
        turns: "wait": a turn is due after the answers it waits for. "trace": at its time.
    """

    trace: Path | Sequence[TraceRequest]
    format_name: str | None = None
    skip_bad: bool = False
    too_long: str = "error"
    arrivals: Arrivals = TRACE_ARRIVALS
    rate: float | None = None
    speed: float | None = None
    load: float | None = None
    duration: float | None = None
    seed: int = 0
    turns: str = "trace"

    def source(self, context: int) -> list[TraceRequest]:
        """Read the rows of the trace, fitted to the model's context (InputError: a bad trace)."""
        return self.trace_source(context).rows(with_blocks)

    def requests(
        self, context: int, capacity_per_s: Callable[[Sequence[TraceRequest]], float]
    ) -> tuple[list[TraceRequest], float]:
        """Make the paced requests, and the seconds that arrivals go on (InputError: a bad option).

        A rate counts all requests. A turn that waits has the time at which it is due if no answer
        comes later.

        Args:
            capacity_per_s: called with the rows, only when the pace is given as a load.
        """
        # One option sets the pace. A load becomes a rate once the capacity is known.
        if self.arrivals.closed:
            raise InputError("--arrivals closed:N: a simulation needs arrival times; give another")
        if self.turns not in TURNS:
            raise InputError(f"--turns: {self.turns!r} is none of {', '.join(TURNS)}")
        rate = self.rate
        if self.load is not None:
            if rate is not None or self.speed is not None:
                raise InputError("--load, --rate and --speed all set the pace; give one of them")
            if self.load <= 0:
                raise InputError(f"--load {self.load:g} is not a number above 0")
        source = self.trace_source(context)
        rows = source.rows(with_blocks)
        if self.load is not None:
            rate = self.load * capacity_per_s(rows)
        if self.turns == "wait" and is_linked(rows):
            return self._sessions(link(rows, source.name, lenient=source.may_lack_rows), rate)
        schedule = self.schedule([row.arrival_s for row in rows], rate)
        # A simulation begins with the first arrival.
        first_s = schedule.times_s[0]
        paced = [
            _at(row, at_s - first_s) for row, at_s in zip(rows, schedule.times_s, strict=False)
        ]
        return paced, schedule.window_s

    def waiting(self, rows: Sequence[TraceRequest]) -> Callable[[], WaitingTurns] | None:
        """Return a function that makes the turns of paced `rows` wait, or None without turns."""
        if self.turns != "wait" or not is_linked(rows):
            return None
        until_s = inf if self.duration is None else self.duration
        return lambda: WaitingTurns(rows, until_s=until_s)

    def trace_source(self, context: int) -> TraceSource:
        """Return the reader of the trace for engines with this context."""
        return TraceSource(
            self.trace,
            format_name=self.format_name,
            skip_bad=self.skip_bad,
            max_model_len=context,
            too_long=self.too_long,
        )

    def _sessions(self, agenda: Agenda, rate: float | None) -> tuple[list[TraceRequest], float]:
        """Pace the roots of sessions, and move their turns with them."""
        rate = root_rate(agenda, rate)
        starts_s = [agenda.rows[root].arrival_s for root in agenda.roots]
        schedule = self.schedule(starts_s, rate)
        pace = root_pace(agenda, self.arrivals, rate, self.speed)
        dues_s = dict(zip(agenda.roots, schedule.times_s, strict=False))  # --duration leaves some
        paced = []
        for index, row in enumerate(agenda.rows):
            root = agenda.root_of(index)
            if root in dues_s:
                later_s = (row.arrival_s - agenda.rows[root].arrival_s) / pace
                paced.append(_at(row, dues_s[root] - schedule.times_s[0] + later_s))
        return paced, schedule.window_s

    def schedule(self, times_s: Sequence[float], rate: float | None) -> Schedule:
        """Return the times at which arrivals that were at `times_s` are due."""
        return make_schedule(
            times_s,
            self.arrivals,
            rate_per_s=rate,
            speed=self.speed,
            duration_s=self.duration,
            seed=self.seed,
        )


def is_linked(rows: Iterable[TraceRequest]) -> bool:
    """True if a row waits for the answer to another row."""
    return any(row.parent or row.waits_for for row in rows)


def _at(row: TraceRequest, due_s: float) -> TraceRequest:
    """Return the row at another time. A copy costs a third of reading the row."""
    return row if row.arrival_s == due_s else replace(row, arrival_s=due_s)


def with_blocks(row: TraceRequest) -> TraceRequest:
    """Replace the text of a row by block ids made from it, so that equal prefixes are found."""
    text = shared_text(row)
    if text is None or row.blocks is not None:
        return row
    ids = chained_hashes(text.encode(), BLOCK_TOKENS * BYTES_PER_TOKEN)
    most = -(-row.input_tokens // BLOCK_TOKENS)
    return replace(
        row, text=None, messages=None, blocks=tuple(ids[:most]), block_tokens=BLOCK_TOKENS
    )
