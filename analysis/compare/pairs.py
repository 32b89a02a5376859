"""Pair the requests of two runs by id, where both were sent the same requests at the same times.

Both runs then have their slow times together, and their common part falls out of the interval. With
other times the order of one run means nothing in the other, so nothing is paired.
"""

import numpy as np

from forebay.analysis.compare.figures import RunFigures
from forebay.analysis.statistics.quantiles import Floats

LEAST_SHARE = 0.99
"""Least share of paired requests in either run. With fewer pairs, the rest could decide."""
SAME_TIME_S = 0.05


def paired(a: RunFigures, b: RunFigures, bucket: str, column: str) -> tuple[Floats, Floats] | None:
    """Return a latency of the same requests in both runs, in order of time, or None.

    None also for a run and itself, as a report of one run compares it.
    """
    if a.run is b.run:
        return None
    of_a, of_b = _places(a, bucket, column), _places(b, bucket, column)
    both = [name for name in of_a if name in of_b]
    if not both or len(both) < LEAST_SHARE * max(len(of_a), len(of_b)):
        return None
    at_a, at_b = (np.array([places[name] for name in both]) for places in (of_a, of_b))
    due_a, due_b = a.run.numbers["intended_s"][at_a], b.run.numbers["intended_s"][at_b]
    if np.isnan(due_a).any() or not np.allclose(due_a, due_b, rtol=0.0, atol=SAME_TIME_S):
        return None
    order = due_a.argsort(kind="stable")
    return a.run.numbers[column][at_a[order]], b.run.numbers[column][at_b[order]]


def _places(side: RunFigures, bucket: str, column: str) -> dict[str, int]:
    """Return the row of each answered id. Empty if a request has none, or two share one."""
    ids = side.run.words.get("id")
    if ids is None:
        return {}
    rows = np.flatnonzero(side.of[bucket].ok & ~np.isnan(side.run.numbers[column])).tolist()
    places = {ids[row]: row for row in rows if ids[row]}
    return places if len(places) == len(rows) else {}
