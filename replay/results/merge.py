"""Merge the folders of the parts of a run: rows in order of their ends, histograms added up."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from math import inf
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from forebay.proxy.telemetry.hlog import (
    HlogWriter,
    LogInterval,
    Total,
    add_into,
    hlog_intervals,
    new_histogram,
    read_overflows,
)
from forebay.replay.results.folder import ANSWERS, GROUP_ROWS, HLOG, SUMMARY, TABLE, RunFolder
from forebay.replay.results.row import Row
from forebay.replay.results.summary import RunTotals
from forebay.traces.errors import InputError


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a run whose rows are in its folder.

    Attributes:
        histograms: of the whole run, by `metric.bucket`.
        ended: "complete", "interrupted" or "drain timeout".
        stopped_s: second of the run at which sending stopped.
        sent: number of requests sent.
        nodes: machines that sent, each with what was found out about its clock.
    """

    histograms: Mapping[str, Total]
    ended: str
    stopped_s: float
    sent: int
    started_unix_s: float
    nodes: Sequence[Mapping[str, Any]] = ()


async def merge_parts(
    places: Sequence[Path],
    ended: str,
    started_unix_s: float,
    interval_s: float,
    folder: RunFolder,
    totals: RunTotals,
    comments: Sequence[str],
    starts_s: Sequence[float] = (),
) -> Measured:
    """Write the rows, the log and the answers of all parts to `folder`, and add up `totals`.

    Args:
        places: folders of the parts.
        interval_s: length of an interval of the logs, in seconds of the run.
        starts_s: second at which each part began, at a boundary of intervals; empty: all at 0.
    """
    summaries = [orjson.loads((place / SUMMARY).read_bytes()) for place in places]
    starts_s = starts_s or [0.0] * len(places)
    for number, row in enumerate(merge(*map(_rows, places, starts_s), key=_end_s)):
        folder.table.add(row)
        totals.add(row)
        if number % GROUP_ROWS == GROUP_ROWS - 1:
            await folder.table.write_full_groups()
    if folder.answers is not None:
        _join([place / ANSWERS for place in places], folder.answers)
    writer = HlogWriter(folder.hlog, started_unix_s, comments)
    logs = list(map(_lines, places, starts_s, map(_first_tokens, summaries)))
    histograms = _merge_logs(logs, interval_s, writer)
    for place in places:
        for tag, overflow in read_overflows(place / HLOG).items():
            histograms[tag].overflow += overflow
    writer.overflows(histograms)
    stopped_s = max(summary["window_s"] for summary in summaries)
    sent = totals.requests - totals.failed["never_sent"]
    return Measured(histograms, ended, stopped_s, sent, started_unix_s)


def _join(files: Sequence[Path], out: BinaryIO) -> None:
    for file in files:
        with open(file, "rb") as answers:
            shutil.copyfileobj(answers, out)


TIMES = ("intended_s", "sent_s", "first_s", "last_s", "done_s")  # those of a row since the start


def _rows(place: Path, start_s: float) -> Iterator[Row]:
    import pyarrow.parquet

    file: Any = pyarrow.parquet.ParquetFile(place / TABLE)
    for batch in file.iter_batches(batch_size=GROUP_ROWS):
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            row = Row(*values)
            yield _later(row, start_s) if start_s else row


def _later(row: Row, start_s: float) -> Row:
    times = {name: getattr(row, name) for name in TIMES}
    return replace(row, **{name: at + start_s for name, at in times.items() if at is not None})


def _end_s(row: Row) -> float:
    return inf if row.done_s is None else row.done_s


def _first_tokens(summary: Any) -> int | None:
    """Return how many first tokens a summary counts; None if it does not say."""
    try:
        return int(summary["ttft_ms"]["all"]["count"])
    except (KeyError, TypeError, ValueError):
        return None


def _lines(
    place: Path, start_s: float, first_tokens: int | None
) -> Iterator[tuple[str, LogInterval]]:
    """Yield the intervals of a part; raises InputError at their end if some are missing."""
    found = 0
    for tag, one in hlog_intervals(place / HLOG):
        if tag.startswith("ttft_response."):
            found += one.histogram.total_count
        yield tag, one._replace(start_s=one.start_s + start_s)
    if first_tokens not in (None, found):
        raise InputError(
            f"{place / HLOG}: has {found:,} times of a first token, but {SUMMARY} counts "
            f"{first_tokens:,}; it is damaged: repeat the run"
        )


def _merge_logs(
    logs: Sequence[Iterator[tuple[str, LogInterval]]], interval_s: float, writer: HlogWriter
) -> dict[str, Total]:
    """Write one log from several; intervals that began at about the same time become one."""
    totals: dict[str, Total] = {}
    current: dict[str, LogInterval] = {}
    turn = 0

    def write() -> None:
        for tag, one in current.items():
            writer.write(tag, one.start_s, one.length_s, one.histogram)
            add_into(totals.setdefault(tag, Total()).histogram, one.histogram)
        current.clear()

    for tag, one in merge(*logs, key=lambda pair: pair[1].start_s):
        if (begun := round(one.start_s / interval_s)) != turn:
            write()
            turn = begun
        known = current.get(tag)
        if known is None:
            known = LogInterval(one.start_s, one.length_s, new_histogram())
        add_into(known.histogram, one.histogram)
        end_s = max(known.start_s + known.length_s, one.start_s + one.length_s)
        current[tag] = LogInterval(known.start_s, end_s - known.start_s, known.histogram)
    write()
    return totals
