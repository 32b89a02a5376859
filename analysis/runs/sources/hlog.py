"""Read the lines of an .hlog of any program: V0 to V2, with and without tags, stamps and legend."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forebay.analysis.runs.sources.hdr_payload import Counted, decode_payload
from forebay.analysis.statistics.units import printable
from forebay.traces.ground.errors import InputError

UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
NAMES = {"ns": "nanoseconds", "us": "microseconds", "ms": "milliseconds", "s": "seconds"}
YEAR_S = 366 * 86_400
MILLISECONDS = 1e11  # larger stamps are no seconds since 1970
MOST_TAGS = 1_000
_STAMP = re.compile(r"#\[(base|start)time: ([0-9.eE+-]+)", re.IGNORECASE)  # Go 1.1 has Basetime


@dataclass(frozen=True, slots=True)
class Interval:
    """One line: its time, its tag (may be ""), and its histogram. `largest` is as printed."""

    start_s: float
    length_s: float
    largest: float
    tag: str
    counted: Counted


@dataclass(frozen=True, slots=True)
class HistogramLog:
    """The intervals of a file.

    Attributes:
        start_unix_s: wall clock at second 0, None if the file does not say.
        unit: unit of the values, a key of UNITS_S.
        stated: the source of the unit, as a sentence.
        notes: sentences on lines that could not be read, and on stamps.
    """

    intervals: Sequence[Interval]
    start_unix_s: float | None
    unit: str
    stated: str
    notes: Sequence[str]


def read_log(path: Path, text: str, unit: str | None = None) -> HistogramLog:
    """Read a log. `unit` overrides the unit in the file.

    Raises:
        InputError: no line is an interval.
    """
    # Comments have the times and the unit. A line that is no interval is counted.
    lines = [line.strip() for line in text.splitlines()]
    stamps, ours = _comments(lines)
    intervals: list[Interval] = []
    bad: list[str] = []
    tags: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line and not line.startswith(("#", '"')):
            try:
                intervals.append(_interval(line))
            except ValueError as error:
                bad.append(f"line {number}: {error}")
                continue
            tags.add(intervals[-1].tag)
            if len(tags) > MOST_TAGS:
                raise InputError(f"{path}: more than {MOST_TAGS:,} tags; split the log by tag")
    notes = [f"{len(bad):,} lines were not read, {bad[0]}"] if bad else []
    if not intervals:
        why = f" ({bad[0]})" if bad else ""
        raise InputError(f"{path}: holds no interval of a histogram log{why}")
    if intervals[0].start_s > MILLISECONDS:  # Go's library: both ends, until November 2025
        notes.append("stamps are read as the start and the end of an interval, in milliseconds")
        intervals = _of_milliseconds(intervals)
    if not all(-YEAR_S < each.start_s <= MILLISECONDS for each in intervals):
        raise InputError(f"{path}: a stamp is no time in seconds; correct the log")
    # Stamps may count from the file's start or from 1970.
    start, shift = _start(stamps, intervals[0].start_s)
    moved = [replace(interval, start_s=interval.start_s + shift) for interval in intervals]
    unit_name, stated = (unit, "--unit") if unit else _unit(intervals, ours)
    return HistogramLog(moved, start, unit_name, f"values are {NAMES[unit_name]} ({stated})", notes)


def _comments(lines: Sequence[str]) -> tuple[dict[str, float], bool]:
    """Return the times that comments state, and whether our own writer wrote them."""
    comments = [line for line in lines if line.startswith("#")]
    matches = (_STAMP.match(line) for line in comments)
    stamps = {match[1].lower(): float(match[2]) for match in matches if match}
    return stamps, any(line.startswith("#[microseconds;") for line in comments)


def _of_milliseconds(intervals: Sequence[Interval]) -> list[Interval]:
    """Return intervals in seconds, of stamps that are both ends in milliseconds."""
    return [
        replace(each, start_s=each.start_s / 1e3, length_s=(each.length_s - each.start_s) / 1e3)
        for each in intervals
    ]


def _interval(line: str) -> Interval:
    tag = ""
    if line.startswith("Tag="):
        tag, _, line = line[4:].partition(",")
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 4:
        raise ValueError(f"{len(fields)} fields, where an interval has 4")
    start, length, largest = map(float, fields[:3])
    return Interval(start, length, largest, printable(tag), decode_payload(fields[3]))


def _start(stamps: dict[str, float], first_s: float) -> tuple[float | None, float]:
    """Return the wall clock at second 0, and the seconds to add to the stamps of lines.

    As the Java reader: with a BaseTime stamps count from it. Without one they count from the
    StartTime if they are more than a year before it, else from 1970.
    """
    base, start = stamps.get("base"), stamps.get("start")
    if base is not None:
        start = base + first_s if start is None else start
        return start, base - start
    if start is None:
        return (first_s, -first_s) if first_s > YEAR_S else (None, 0.0)
    return (start, 0.0) if first_s < start - YEAR_S else (start, -start)


def _unit(intervals: Sequence[Interval], ours: bool) -> tuple[str, str]:
    """Return the unit of the values, and its source."""
    if ours:
        return "us", "as the file says"
    for interval in intervals:
        if interval.counted.total and interval.largest > 0:
            ratio = float(interval.counted.values[-1]) / interval.largest
            power = int(np.round(np.log10(max(ratio, 1.0))))
            if power == 6:
                return "ns", "Interval_Max is a millionth of them, as Java's tools write it"
            if power == 3:
                return "us", "Interval_Max is a thousandth of them"
    return "ms", "a guess, as the file does not say; --unit says otherwise"
