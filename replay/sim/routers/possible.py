"""Bound how many requests of a trace any scheduler could serve in time, even an all-knowing one.

The bound is the optimum of a linear program that is easier than the real problem in every respect,
so no schedule on these engines exceeds it. The best schedule may serve fewer. In the program

- all engines are one machine, `engines` times as fast, which interrupts work at no cost.
- an API server has no other request.
- a prefill takes the time that the step-time model charges in full steps, and output tokens take no
  time.
- the KV cache is infinite: a prefix is computed once for all engines, at the earliest when the
  first request that has it arrives, and each request that has it pays an equal part of the cost.
- a request may be served in part, and then counts in part.

A set of requests fits if no interval holds more work than the machine does in it: work that may
only be done inside (Horn 1974, "Some simple scheduling algorithms"). The vectors of work that fits
are a polymatroid, so the greedy rule is optimal: least work first, of each as much as fits (Edmonds
1970, "Submodular functions, matroids, and certain polyhedra"). A request counts as 0 if the part of
its prompt that is new when it arrives takes longer on one engine than its target allows.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf, isqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.step_time import StepWork
from forebay.traces.ground.schema import TraceRequest

Floats = NDArray[np.float64]
CELLS: Final = 4_000_000_000
"""Table cells that one bound visits at most: a few seconds. With more than its cube root (1,587) of
requests, releases are rounded down and deadlines up, which can only raise the bound."""

ROUNDING_S: Final = 1e-6  # more than the rounding errors of a sum of 100,000 works


def most_in_time(
    rows: Sequence[TraceRequest], limits_s: Sequence[float], engine: EngineConfig, engines: int
) -> Floats:
    """Return for each of `rows` the part that the bound counts, 0 to 1. Their sum is the bound.

    Args:
        limits_s: targets of the TTFT of `rows`, seconds. inf without a target.
    """
    cost, count = LeastPrefill(engine), len(rows)
    users = Counter(block for row in rows for block in row.blocks or ())
    first_s: dict[int, float] = {}  # when the first request that has this block can be computed
    release, deadline, work = np.empty(count), np.empty(count), np.zeros(count)
    counted = np.ones(count)
    for number, (row, limit_s) in enumerate(zip(rows, limits_s, strict=True)):
        arrival_s = row.arrival_s + cost.server_s(row.input_tokens)
        deadline[number] = end_s = row.arrival_s + limit_s
        parts = list(_parts(row, arrival_s, first_s, users, cost))
        if sum(part_s for start_s, part_s, _ in parts if start_s == arrival_s) > end_s - arrival_s:
            counted[number] = 0.0
        elif limit_s < inf:
            paid = [(start_s, part_s / payers) for start_s, part_s, payers in parts]
            release[number], work[number] = densest(paid, end_s)
    at = np.flatnonzero((counted > 0) & (work > 0))
    counted[at] = fitting(release[at], deadline[at], work[at], engines)
    return counted


class LeastPrefill:
    """Least seconds that a prefill adds to an engine's steps, regardless of other work in them.

    The cost of a token falls with the size of its step, so the largest step is cheapest. It is
    taken without its chunks, because launching these may take less time than the step.
    """

    def __init__(self, engine: EngineConfig) -> None:
        model = engine.timing()
        full = StepWork(tokens=engine.batched_tokens, sequences=1)
        self._times = engine.step_constants().server_times()
        self._token_s = model.step_s(full) / engine.batched_tokens
        self._pair_s = model.pair_s
        self._whole_s: dict[int, list[float]] = {}

    def server_s(self, prompt_tokens: int) -> float:
        """Return the least seconds that a request spends in an idle API server."""
        return self._times.alone_s(prompt_tokens)

    def seconds(self, start: int, end: int) -> float:
        """Return the least seconds for the tokens of a prompt from `start` up to `end`."""
        return self._token_s * (end - start) + self._pair_s * (end * end - start * start) / 2

    def of_blocks(self, tokens: int, count: int) -> Sequence[float]:
        """Return the least seconds for each of the first blocks of a prompt, `count` at least."""
        costs = self._whole_s.setdefault(tokens, [])
        while len(costs) < count:
            start = len(costs) * tokens
            costs.append(self.seconds(start, start + tokens))
        return costs


def _parts(
    row: TraceRequest,
    arrival_s: float,
    first_s: dict[int, float],
    users: Mapping[int, int],
    cost: LeastPrefill,
) -> Iterator[tuple[float, float, int]]:
    """Yield release time, seconds of work and number of users for each part of a prompt."""
    blocks = row.blocks or ()
    whole = min(len(blocks), row.input_tokens // row.block_tokens)
    for block, work_s in zip(blocks[:whole], cost.of_blocks(row.block_tokens, whole), strict=False):
        yield first_s.setdefault(block, arrival_s), work_s, users[block]
    done = whole * row.block_tokens
    for block in blocks[whole:]:
        work_s, done = cost.seconds(done, row.input_tokens), row.input_tokens
        yield first_s.setdefault(block, arrival_s), work_s, users[block]
    yield arrival_s, cost.seconds(done, row.input_tokens), 1


def densest(parts: Sequence[tuple[float, float]], deadline_s: float) -> tuple[float, float]:
    """Return the release and the work of the end of a prompt that leaves the least room to wait.

    The beginning of a prompt may have come long before. Leaving a part out is a relaxation, too,
    and the later the release of the rest is, the more its work constrains.

    Args:
        parts: release and work of each part of a prompt, in order.
    """
    best, release_s, work_s = (deadline_s, 0.0), deadline_s, 0.0
    density = 0.0
    for start_s, part_s in reversed(parts):
        if start_s < release_s:
            release_s = start_s
        work_s += part_s
        if work_s > density * (deadline_s - release_s):
            density, best = work_s / (deadline_s - release_s), (release_s, work_s)
    return best


def fitting(release: Floats, deadline: Floats, work: Floats, engines: float) -> Floats:
    """Return the part of each request that is served if as many as possible are (see the module).

    Args:
        release: earliest start of the work, seconds.
        deadline: latest end of the work, later than `release`.
        work: seconds on one engine, above 0.
    """
    count = len(work)
    if not count:
        return np.zeros(0)
    points = min(count, isqrt(CELLS // count))
    starts, ends = _grid(release, points), _grid(deadline, points)
    opens = np.searchsorted(starts, release, "right")
    closes = np.searchsorted(ends, deadline, "left")
    # What is left of the time between each start (row) and each end (column).
    room = engines * (ends[None, :] - starts[:, None])
    if _all_fit(room, opens, closes, work):
        return np.ones(count)
    served = np.zeros(count)
    for number in np.argsort(work, kind="stable"):
        around = room[: opens[number], closes[number] :]
        served_s = min(work[number], float(around.min()))
        if served_s > 0:
            around -= served_s
            served[number] = served_s / work[number]
    return served


def _all_fit(room: Floats, opens: NDArray[np.intp], closes: NDArray[np.intp], work: Floats) -> bool:
    """True if every interval surely holds the work that may only be done inside.

    A few sums then replace the visit of all intervals for each request.
    """
    inside = np.zeros(room.shape)
    np.add.at(inside, (opens - 1, closes), work)
    inside = inside[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
    return bool((room - inside)[inside > 0].min() > ROUNDING_S)


def _grid(times: Floats, points: int) -> Floats:
    """Return at most `points` of the distinct times, with the first and the last."""
    distinct = np.unique(times)
    if len(distinct) <= points:
        return distinct
    ranks = np.linspace(0, len(distinct) - 1, points).round().astype(int)
    chosen: Floats = distinct[ranks]
    return chosen
