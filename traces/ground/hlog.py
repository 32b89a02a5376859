"""Write and read HdrHistogram interval logs (text format V2 of the Java and JavaScript tools).

Durations are recorded in seconds under a tag. Once a second each tag with values becomes one line.
hdrhistogram's own log writer is not used: it cannot write a StartTime, never writes a tag and
floors Interval_Max. Its encoder is correct. Nothing here reads a clock: time stamps are arguments.

Every histogram holds whole microseconds from 1 us to 1 h with 3 significant digits (worst error
0.05 %). A value outside is clamped to the bound. Above 1 h it is also counted as overflow.
"""

import binascii
import ctypes
import math
import re
import sys
import time
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hdrh.codec import HdrCookieException, HdrHistogramSettingsException, HdrLengthException
from hdrh.histogram import HdrHistogram

from forebay.traces.ground.errors import InputError

LOWEST_US = 1
HIGHEST_US = 3_600_000_000
SIGNIFICANT_DIGITS = 3
MAX_VALUE_UNIT_RATIO = 1000  # Interval_Max is in ms, the histogram in us
MAX_PENDING = 65_536  # values kept before they are added to the interval's histogram
BULK_FROM = 64  # for fewer values a loop is faster than numpy's fixed cost
LEGEND = '"StartTimestamp","Interval_Length","Interval_Max","Interval_Compressed_Histogram"'

_TAG = re.compile(r"[^,\s]+")
_BASE64 = re.compile(r"HISTF[A-Za-z0-9+/]+={0,2}")
_OVERFLOW = re.compile(r"#\[overflow: (\S+) (\d+) above")
_DECODE_ERRORS = (
    binascii.Error,
    zlib.error,
    HdrCookieException,
    HdrLengthException,
    HdrHistogramSettingsException,
    ArithmeticError,
    AssertionError,  # the decoder raises it for an empty payload
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def new_histogram() -> Any:
    """Return an empty histogram with the bounds of every log."""
    return HdrHistogram(LOWEST_US, HIGHEST_US, SIGNIFICANT_DIGITS)


def to_us(seconds: float) -> int:
    """Convert seconds to whole microseconds, at least 1 (a histogram has no 0)."""
    return max(LOWEST_US, round(seconds * 1e6))


def _used(histogram: Any) -> int:
    """Return the number of leading counts after which all are 0."""
    if not histogram.total_count:
        return 0
    return int(histogram.get_counts_array_index(int(histogram.max_value))) + 1


def _empty(histogram: Any) -> None:
    """Make a histogram as good as new (the library's `reset` takes a millisecond)."""
    ctypes.memset(histogram.counts, 0, _used(histogram) * histogram.word_size)
    histogram.total_count = histogram.max_value = 0
    histogram.min_value = sys.maxsize


def all_to_us(seconds: "array[float]") -> "array[int]":
    """Convert as `to_us` does. With numpy, if the program has loaded it, at 5 ns a value."""
    numpy = sys.modules.get("numpy")
    if numpy is None or len(seconds) < BULK_FROM:
        return array("q", [to_us(value) for value in seconds])
    values = numpy.rint(numpy.frombuffer(seconds) * 1e6).astype(numpy.int64)
    return array("q", numpy.maximum(values, LOWEST_US).tobytes())


def record_all(histogram: Any, values_us: "array[int]") -> int:
    """Record values in bulk. Returns the number of values above 1 h, which are clamped.

    The result is identical to `record_value` for each. numpy (8 to 40 ns a value, not 570 ns) is
    used if the program has loaded it: loading it here would block a running loop for 0.1 s.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and len(values_us) >= BULK_FROM:
        return _record_bulk(numpy, histogram, values_us)
    mask, magnitude = histogram.sub_bucket_mask, histogram.sub_bucket_half_count_magnitude
    unit, half, counts = histogram.unit_magnitude, histogram.sub_bucket_half_count, histogram.counts
    overflow = 0
    for value_us in values_us:
        value = value_us
        if not LOWEST_US <= value_us <= HIGHEST_US:
            overflow += value_us > HIGHEST_US
            value = min(max(value_us, LOWEST_US), HIGHEST_US)
        shift = (value | mask).bit_length() - magnitude - 1
        counts[((shift - unit + 1) << magnitude) + (value >> shift) - half] += 1
        histogram.min_value = min(histogram.min_value, value)
        histogram.max_value = max(histogram.max_value, value)
    histogram.total_count += len(values_us)
    return overflow


def _record_bulk(numpy: Any, histogram: Any, values_us: "array[int]") -> int:
    raw = numpy.frombuffer(values_us, dtype=numpy.int64)
    values = numpy.clip(raw, LOWEST_US, HIGHEST_US)
    # frexp gives the bit length exactly: every value is far below 2**53
    bits = numpy.frexp((values | histogram.sub_bucket_mask).astype(numpy.float64))[1]
    magnitude = histogram.sub_bucket_half_count_magnitude
    bucket = bits.astype(numpy.int64) - histogram.unit_magnitude - (magnitude + 1)
    sub_bucket = values >> (bucket + histogram.unit_magnitude)
    index = ((bucket + 1) << magnitude) + sub_bucket - histogram.sub_bucket_half_count
    counts = numpy.frombuffer(histogram.counts, dtype=numpy.int64)
    if len(values) < len(counts) // 4:  # does not touch all of them
        places, times = numpy.unique(index, return_counts=True)
        counts[places] += times
    else:
        counts += numpy.bincount(index, minlength=len(counts))
    histogram.total_count += len(values)
    histogram.min_value = min(histogram.min_value, int(values.min()))
    histogram.max_value = max(histogram.max_value, int(values.max()))
    return int((raw > HIGHEST_US).sum())


def add_into(total: Any, other: Any) -> None:
    """Add `other` to `total`, keeping the exact maximum (the library's `add` rounds it up)."""
    exact = max(total.max_value, other.max_value)
    numpy, used = sys.modules.get("numpy"), _used(other)
    if numpy is None or _shape(total) != _shape(other) or total.word_size != 8:
        total.add(other)
    elif used:
        counts = numpy.frombuffer(total.counts, dtype=numpy.int64)
        counts[:used] += numpy.frombuffer(other.counts, dtype=numpy.int64)[:used]
        total.total_count += other.total_count
        total.min_value = min(total.min_value, other.min_value)
    total.max_value = exact


def _shape(histogram: Any) -> tuple[int, int, int]:
    return histogram.counts_len, histogram.sub_bucket_count, histogram.unit_magnitude


class HlogWriter:
    """Writes header and interval lines to a text stream of the caller."""

    def __init__(self, stream: TextIO, start_unix_s: float, comments: Sequence[str] = ()) -> None:
        """`start_unix_s`: wall clock at time stamp 0. `comments`: one line each, no brackets."""
        self._stream = stream
        self.comment(
            f"microseconds; Interval_Max in ms: max value unit ratio {MAX_VALUE_UNIT_RATIO}"
        )
        for comment in comments:
            self.comment(comment)
        stream.write("#[Histogram log format version 1.3]\n")
        stream.write(f"#[BaseTime: {start_unix_s:.3f} (seconds since epoch)]\n")
        stream.write(f"#[StartTime: {start_unix_s:.3f} (seconds since epoch), ")
        stream.write(f"{_java_date(start_unix_s)}]\n{LEGEND}\n")

    def overflows(self, totals: "Mapping[str, Total]") -> None:
        """Write the overflows as comments."""
        for tag, total in totals.items():
            if total.overflow:
                self.comment(f"overflow: {tag} {total.overflow} above 1 h, clamped to it")

    def comment(self, text: str) -> None:
        self._stream.write(f"#[{' '.join(text.split())}]\n")

    def write(self, tag: str, start_s: float, length_s: float, histogram: Any) -> None:
        """Write one interval. `start_s` counts from the base time. "" is the default tag."""
        if tag and not _TAG.fullmatch(tag):
            raise ValueError(f"a tag holds no comma and no space: {tag!r}")
        prefix = f"Tag={tag}," if tag else ""
        max_ms = histogram.max_value / MAX_VALUE_UNIT_RATIO
        payload = histogram.encode().decode("ascii")
        self._stream.write(f"{prefix}{start_s:.3f},{length_s:.3f},{max_ms:.3f},{payload}\n")


def _java_date(unix_s: float) -> str:
    """Format as `Tue Nov 14 22:13:20 UTC 2023`, in any locale."""
    words = time.asctime(time.gmtime(unix_s)).split()
    return f"{words[0]} {words[1]} {int(words[2]):02d} {words[3]} UTC {words[4]}"


@dataclass(slots=True)
class Total:
    """Everything recorded under one tag."""

    histogram: Any = field(default_factory=new_histogram)
    overflow: int = 0


class IntervalLog:
    """Collects durations by tag. Each `flush` writes one line for each tag with values.

    Recording appends to an array (40 ns). Once per interval all its values become microseconds and
    fill the histograms.
    """

    def __init__(self, writer: HlogWriter) -> None:
        self.totals: defaultdict[str, Total] = defaultdict(Total)
        self._writer = writer
        self._pending = _no_values()
        self._folded: defaultdict[str, Any] = defaultdict(self._spared)
        self._spare: list[Any] = []  # empty histograms: to make one takes longer than all else
        self._since_s = 0.0

    def record(self, tag: str, seconds: float, count: int = 1) -> None:
        """Record `count` equal durations under `tag`."""
        pending = self._pending[tag]
        if count == 1:
            pending.append(seconds)
        elif count > 1:  # not into the array: a server may report any count
            value = to_us(seconds)
            self.totals[tag].overflow += count if value > HIGHEST_US else 0
            self._folded[tag].record_value(min(value, HIGHEST_US), count)
        if len(pending) >= MAX_PENDING:
            self._fold(tag)

    def record_each(self, tag: str, seconds: Iterable[float]) -> None:
        """Record several durations under `tag`."""
        pending = self._pending[tag]
        pending.extend(seconds)
        if len(pending) >= MAX_PENDING:
            self._fold(tag)

    def flush(self, now_s: float) -> None:
        """Write the interval that ends now and add it to the totals."""
        for _ in self.flush_steps(now_s):
            pass

    def flush_steps(self, now_s: float) -> Iterator[None]:
        """`flush` in steps of a fraction of a millisecond, between which a loop can do other work.

        The interval ends at the first step: later values belong to the next one.
        """
        pending, self._pending = self._pending, _no_values()
        interval, self._folded = self._folded, defaultdict(self._spared)
        start_s, self._since_s = self._since_s, now_s
        for tag in dict.fromkeys((*interval, *pending)):
            if values := pending.get(tag):
                self.totals[tag].overflow += record_all(interval[tag], all_to_us(values))
                yield
            histogram = interval.get(tag)
            if histogram is None:
                continue
            self._writer.write(tag, start_s, now_s - start_s, histogram)
            add_into(self.totals[tag].histogram, histogram)
            _empty(histogram)
            self._spare.append(histogram)
            yield

    def close(self, now_s: float) -> None:
        """Flush, and write the overflows as comments."""
        self.flush(now_s)
        self._writer.overflows(self.totals)

    def _fold(self, tag: str) -> None:
        values_us = all_to_us(self._pending.pop(tag))
        self.totals[tag].overflow += record_all(self._folded[tag], values_us)

    def _spared(self) -> Any:
        return self._spare.pop() if self._spare else new_histogram()


def _no_values() -> "defaultdict[str, array[float]]":
    return defaultdict(lambda: array("d"))


class LogInterval(NamedTuple):
    """One line of a log. `start_s` counts from the log's StartTime."""

    start_s: float
    length_s: float
    histogram: Any


def read_hlog(path: Path | str) -> dict[str, list[LogInterval]]:
    """Return the intervals of a log by tag ("" for untagged lines), in file order. See below."""
    logs: dict[str, list[LogInterval]] = {}
    for tag, interval in hlog_intervals(path):
        logs.setdefault(tag, []).append(interval)
    return logs


def hlog_intervals(path: Path | str) -> Iterator[tuple[str, LogInterval]]:
    """Read the tag and interval of each line of a log of ours.

    A line that is neither comment nor interval raises InputError with its number.
    """
    try:
        with open(path, encoding="utf-8", newline="\n") as lines:
            for number, raw in enumerate(lines, 1):
                line = raw.rstrip("\r\n")
                if line and not line.startswith("#") and line != LEGEND:
                    yield _interval(line, f"{path}:{number}")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file, so not a histogram log") from error


def read_overflows(path: Path | str) -> dict[str, int]:
    """Return the overflows that a log of ours states, by tag."""
    with open(path, encoding="utf-8", newline="\n") as lines:
        matches = (_OVERFLOW.match(line) for line in lines if line.startswith("#[overflow"))
        return {match[1]: int(match[2]) for match in matches if match is not None}


def _interval(line: str, where: str) -> tuple[str, LogInterval]:
    tag, rest = "", line
    if line.startswith("Tag="):
        tag, _, rest = line[4:].partition(",")
        if not _TAG.fullmatch(tag):
            raise InputError(f"{where}: the tag {tag!r} is empty or holds a space")
    fields = rest.split(",")
    if len(fields) != 4:
        raise InputError(
            f"{where}: {len(fields)} fields where an interval has 4: start, length, max, histogram"
        )
    start = _number(fields[0], "a start in seconds", where)
    length = _number(fields[1], "a length in seconds", where)
    largest_us = round(_number(fields[2], "a largest value", where) * MAX_VALUE_UNIT_RATIO)
    if not _BASE64.fullmatch(fields[3]):
        raise InputError(f"{where}: the last field is no V2 compressed histogram (HISTF...)")
    try:
        histogram = HdrHistogram.decode(fields[3])
    except _DECODE_ERRORS as error:
        raise InputError(f"{where}: the histogram cannot be decoded ({error})") from error
    # The payload has the maximum rounded; the line has it exactly, if it counts in our unit.
    if histogram.values_are_equivalent(largest_us, histogram.max_value):
        histogram.max_value = largest_us
    return tag, LogInterval(start, length, histogram)


def _number(text: str, what: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{where}: {text!r} is not {what} (a number, 0 or more)")
    return value
