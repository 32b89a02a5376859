"""Pair the requests of two runs by id, where both were sent the same requests at the same times.

Both runs then have their slow times together, and their common part falls out of the interval. With
other times the order of one run means nothing in the other, so nothing is paired.
"""

import numpy as np

from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.quantiles import Floats

LEAST_SHARE = 0.99
"""Least share of paired requests in either run. With fewer pairs, the rest could decide."""
SAME_TIME_S = 0.05


def paired(a: RunData, b: RunData, bucket: str, column: str) -> tuple[Floats, Floats] | None:
    """Return a latency of the same requests in both runs, in order of time, or None.

    None also for a run and itself, as a report of one run compares it.
    """
    if a is b:
        return None
    rows = [run.rows(bucket, "ok") & ~np.isnan(run.numbers[column]) for run in (a, b)]
    if any("id" not in run.words for run in (a, b)):
        return None
    of_a, of_b = (
        _places(run.words["id"][mask].tolist()) for run, mask in zip((a, b), rows, strict=True)
    )
    if of_a is None or of_b is None:
        return None
    both = [name for name in of_a if name in of_b]
    if len(both) < LEAST_SHARE * max(len(of_a), len(of_b)):
        return None
    at_a, at_b = (np.array([places[name] for name in both]) for places in (of_a, of_b))
    due_a, due_b = a.numbers["intended_s"][rows[0]][at_a], b.numbers["intended_s"][rows[1]][at_b]
    if np.isnan(due_a).any() or not np.allclose(due_a, due_b, rtol=0.0, atol=SAME_TIME_S):
        return None
    order = due_a.argsort(kind="stable")
    return (
        a.numbers[column][rows[0]][at_a][order],
        b.numbers[column][rows[1]][at_b][order],
    )


def _places(ids: list[str]) -> dict[str, int] | None:
    """Return the place of each id. None without ids, or if two requests share an id."""
    places = {name: at for at, name in enumerate(ids) if name}
    return places if ids and len(places) == len(ids) else None
