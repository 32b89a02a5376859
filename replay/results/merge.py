"""Merge the folders of the parts of a run: rows in order of their ends, histograms added up."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from forebay.replay.results.folder import ANSWERS, GROUP_ROWS, HLOG, SUMMARY, TABLE, RunFolder
from forebay.replay.results.row import Row
from forebay.replay.results.summary import RunTotals
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import (
    HlogWriter,
    LogInterval,
    Total,
    add_into,
    hlog_intervals,
    new_histogram,
    read_overflows,
)

# Columns that count from the start of the run.
TIMES = ("intended_s", "sent_s", "first_s", "last_s", "done_s")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a run whose rows are in its folder.

    Attributes:
        histograms: histograms of the whole run, by `metric.bucket`.
        ended: "complete", "interrupted" or "drain timeout".
        stopped_s: second of the run at which sending stopped.
        sent: number of requests sent.
        nodes: machines that sent, each with facts about its clock.
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
    """Write rows, log and answers of all parts to `folder`, and add up `totals`.

    Args:
        places: folders of the parts.
        interval_s: length of an interval of the logs, in seconds of the run.
        starts_s: second at which each part began, at a boundary of intervals. Empty: all at 0.
    """
    summaries = [orjson.loads((place / SUMMARY).read_bytes()) for place in places]
    starts_s = starts_s or [0.0] * len(places)
    for number, row in enumerate(merge(*map(_rows, places, starts_s), key=_end_s)):
        folder.table.add(row)
        totals.add(row)
        if number % GROUP_ROWS == GROUP_ROWS - 1:
            await folder.table.write_rows()
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


def _rows(place: Path, start_s: float) -> Iterator[Row]:
    import pyarrow.parquet

    file: Any = pyarrow.parquet.ParquetFile(place / TABLE)
    for batch in file.iter_batches(batch_size=GROUP_ROWS):
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            row = Row(*values)
            for name in TIMES if start_s else ():
                if (at_s := getattr(row, name)) is not None:
                    setattr(row, name, at_s + start_s)
            yield row


def _end_s(row: Row) -> float:
    return inf if row.done_s is None else row.done_s


def _first_tokens(summary: Any) -> int | None:
    """Return the number of first tokens in a summary, or None if it has no such count."""
    try:
        return int(summary["ttft_ms"]["all"]["count"])
    except (KeyError, TypeError, ValueError):
        return None


def _lines(
    place: Path, start_s: float, first_tokens: int | None
) -> Iterator[tuple[str, LogInterval]]:
    """Yield the intervals of a part (InputError, at their end: missing intervals)."""
    first_token_count = 0
    for tag, interval in hlog_intervals(place / HLOG):
        if tag.startswith("ttft_response."):
            first_token_count += interval.histogram.total_count
        yield tag, interval._replace(start_s=interval.start_s + start_s)
    if first_tokens not in (None, first_token_count):
        raise InputError(
            f"{place / HLOG}: has {first_token_count:,} times of a first token, but {SUMMARY} "
            f"counts {first_tokens:,}; it is damaged: repeat the run"
        )


def _merge_logs(
    logs: Sequence[Iterator[tuple[str, LogInterval]]], interval_s: float, writer: HlogWriter
) -> dict[str, Total]:
    """Write one log from several. Intervals that began at about the same time are merged."""
    totals: dict[str, Total] = {}
    in_order = merge(*logs, key=lambda pair: pair[1].start_s)
    for _, begun in groupby(in_order, key=lambda pair: round(pair[1].start_s / interval_s)):
        current: dict[str, LogInterval] = {}
        for tag, interval in begun:
            merged = current.get(tag)
            if merged is None:
                merged = LogInterval(interval.start_s, interval.length_s, new_histogram())
            add_into(merged.histogram, interval.histogram)
            end_s = max(merged.start_s + merged.length_s, interval.start_s + interval.length_s)
            current[tag] = LogInterval(merged.start_s, end_s - merged.start_s, merged.histogram)
        for tag, interval in current.items():
            writer.write(tag, interval.start_s, interval.length_s, interval.histogram)
            add_into(totals.setdefault(tag, Total()).histogram, interval.histogram)
    return totals
