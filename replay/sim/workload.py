"""Make the requests of a simulation: a trace under a schedule, as the replayer would send it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from forebay.replay.plan.schedule import TRACE_ARRIVALS, Arrivals, make_schedule
from forebay.replay.plan.source import TraceSource
from forebay.traces.errors import InputError
from forebay.traces.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.text import shared_text

BYTES_PER_TOKEN = 4  # prompt text, of which only equal blocks matter here


@dataclass(frozen=True, slots=True)
class SimWorkload:
    """The trace and its pace, with the options of `forebay replay`.

    Attributes:
        trace: a file, or the requests themselves in order of arrival.
        load: rate as a share of the engines' capacity (`capacity`).
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

    def source(self, context: int) -> list[TraceRequest]:
        """Read the rows of the trace, fitted to the model's context (InputError: a bad trace)."""
        source = TraceSource(
            self.trace,
            format_name=self.format_name,
            skip_bad=self.skip_bad,
            max_model_len=context,
            too_long=self.too_long,
        )
        return source.rows(with_blocks)

    def requests(
        self, context: int, capacity_per_s: Callable[[Sequence[TraceRequest]], float]
    ) -> tuple[list[TraceRequest], float]:
        """Make the paced requests, and the seconds that arrivals go on (InputError: a bad option).

        Args:
            capacity_per_s: called with the rows, only when the pace is given as a load.
        """
        # One option sets the pace. A load becomes a rate once the capacity is known.
        if self.arrivals.closed:
            raise InputError("--arrivals closed:N: a simulation needs arrival times; give another")
        rate = self.rate
        if self.load is not None:
            if rate is not None or self.speed is not None:
                raise InputError("--load, --rate and --speed all set the pace; give one of them")
            if self.load <= 0:
                raise InputError(f"--load {self.load:g} is not a number above 0")
        rows = self.source(context)
        if self.load is not None:
            rate = self.load * capacity_per_s(rows)
        schedule = make_schedule(
            [row.arrival_s for row in rows],
            self.arrivals,
            rate_per_s=rate,
            speed=self.speed,
            duration_s=self.duration,
            seed=self.seed,
        )
        # A simulation begins with the first arrival.
        first_s = schedule.times_s[0]
        dues_s = (at_s - first_s for at_s in schedule.times_s)
        paced = [  # a copy costs a third of reading the row
            row if row.arrival_s == due_s else replace(row, arrival_s=due_s)
            for row, due_s in zip(rows, dues_s, strict=False)
        ]
        return paced, schedule.window_s


def with_blocks(row: TraceRequest) -> TraceRequest:
    """Replace the text of a row by block ids made from it, so that equal prefixes are found."""
    text = shared_text(row)
    if text is None or row.blocks is not None:
        return row
    data, step, before = text.encode(), BLOCK_TOKENS * BYTES_PER_TOKEN, 0
    ids: list[int] = []
    for start in range(0, len(data), step):
        before = xxh3_64_intdigest(data[start : start + step], before)
        ids.append(before)
    most = -(-row.input_tokens // BLOCK_TOKENS)
    return replace(
        row, text=None, messages=None, blocks=tuple(ids[:most]), block_tokens=BLOCK_TOKENS
    )
