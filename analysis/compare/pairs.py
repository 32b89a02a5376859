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
    ids = [run.words["id"][mask].tolist() for run, mask in zip((a, b), rows, strict=True)]
    places = [{name: at for at, name in enumerate(run_ids) if name} for run_ids in ids]
    if not all(ids) or [*map(len, ids)] != [*map(len, places)]:
        return None
    at_a = np.array([at for name, at in places[0].items() if name in places[1]], dtype=np.int64)
    if len(at_a) < LEAST_SHARE * max(map(len, ids)):
        return None
    at_b = np.array([places[1][ids[0][at]] for at in at_a.tolist()], dtype=np.int64)
    due_a, due_b = a.numbers["intended_s"][rows[0]][at_a], b.numbers["intended_s"][rows[1]][at_b]
    if np.isnan(due_a).any() or not np.allclose(due_a, due_b, rtol=0.0, atol=SAME_TIME_S):
        return None
    order = due_a.argsort(kind="stable")
    return (
        a.numbers[column][rows[0]][at_a][order],
        b.numbers[column][rows[1]][at_b][order],
    )
