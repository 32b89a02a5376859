"""Read an .hgrm: a percentile distribution in text, as HdrHistogram and wrk2 print it."""

import re
from pathlib import Path

import numpy as np

from forebay.analysis.runs.sources.hdr_payload import Counted
from forebay.traces.formats.totals import HGRM
from forebay.traces.ground.errors import InputError

NANO = 1_000_000  # values are kept as millionths of the file's unit


def hgrm_header(text: str) -> re.Match[str] | None:
    """Return the columns of a percentile distribution, if one of the first lines has them."""
    return next(filter(None, map(HGRM.match, text[:4096].splitlines())), None)


def read_hgrm(path: Path, text: str) -> Counted:
    """Return the values, in millionths of the file's unit, and the number of samples of each.

    Raises:
        InputError: it holds no rows.
    """
    values, totals = [], []
    begun = False
    for number, line in enumerate(text.splitlines(), 1):
        if HGRM.match(line):
            begun = True
            continue
        fields = line.replace(",", " ").split()
        if not begun or not fields or fields[0].startswith("#"):
            continue
        try:
            value, total = float(fields[0]), int(fields[2])
        except (ValueError, IndexError) as error:
            raise InputError(f"{path}:{number}: no value, percentile and count") from error
        values.append(round(value * NANO))
        totals.append(total)
    cumulative = np.array([0, *totals], dtype=np.int64)
    counts = cumulative[1:] - cumulative[:-1]
    if not len(counts) or counts.sum() <= 0 or (counts < 0).any():
        raise InputError(f"{path}: its percentile distribution has no samples")
    used = counts > 0
    return Counted(np.array(values, dtype=np.int64)[used], counts[used], 2)
