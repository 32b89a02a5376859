"""telemetry/hlog.py: the text of an interval log, what is recorded in it, and reading it back."""

import io
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA

from forebay.traces.ground import hlog
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import (
    HIGHEST_US,
    HlogWriter,
    IntervalLog,
    new_histogram,
    read_hlog,
)

GOLDEN_LOG = DATA / "latency.hlog"
START = 1_700_000_000.0  # Tue Nov 14 22:13:20 UTC 2023

# As the Java library wrote it, from the public tests of HdrHistogramJS (public domain data).
JAVA_PAYLOAD = (
    "HISTFAAAAEV42pNpmSzMwMCgyAABTBDKT4GBgdnNYMcCBvsPEBEJISEuATEZMQ4uASkhIR4nrxg9v2lMaxhvMekILGZk"
    "KmcCAEf2CsI="
)
JAVA_LOG = (
    "#[Fake log chunk]\n"
    "#[Histogram log format version 1.2]\n"
    "#[StartTime: 1441812279.474 (seconds since epoch), Wed Sep 09 08:24:39 PDT 2015]\n"
    '"StartTimestamp","Interval_Length","Interval_Max","Interval_Compressed_Histogram"\n'
    f"0.127,1.007,2.769,{JAVA_PAYLOAD}\n"
    f"Tag=A,1.134,0.999,2.769,{JAVA_PAYLOAD}\n"
)


def write_sample(stream: io.TextIOBase) -> IntervalLog:
    writer = HlogWriter(stream, START, ["sample", "two\nlines"])  # type: ignore[arg-type]
    log = IntervalLog(writer)
    for value in (0.012, 0.760319, 1.5):
        log.record("ttft_response.chat", value)
    log.record("itl.chat", 0.005, count=4)
    log.flush(1.0)
    log.flush(2.0)  # nothing happened: no line
    log.record("ttft_response.chat", 7200.0)
    log.close(2.5)
    return log


def test_golden_file() -> None:
    """The log's text; zlib may differ between versions, so payloads are compared decoded."""
    stream = io.StringIO()
    write_sample(stream)
    ours, golden = stream.getvalue().splitlines(), GOLDEN_LOG.read_text().splitlines()
    assert [line.partition(",HISTFAAAA")[0] for line in ours] == [
        line.partition(",HISTFAAAA")[0] for line in golden
    ]
    assert all("HISTFAAAA" in line for line in ours if line.startswith("Tag="))


def counts(histogram: Any) -> list[tuple[int, int]]:
    return [
        (item.value_iterated_to, item.count_at_value_iterated_to)
        for item in histogram.get_recorded_iterator()
    ]


def test_golden_file_reads_back() -> None:
    logs = read_hlog(GOLDEN_LOG)
    assert sorted(logs) == ["itl.chat", "ttft_response.chat"]
    first, second = logs["ttft_response.chat"]
    assert (first.start_s, first.length_s, first.histogram.total_count) == (0.0, 1.0, 3)
    assert (second.start_s, second.length_s) == (2.0, 0.5)
    assert logs["itl.chat"][0].histogram.total_count == 4


def test_interval_max_is_milliseconds_not_floored() -> None:
    stream = io.StringIO()
    log = IntervalLog(HlogWriter(stream, START))
    log.record("t", 0.760319)
    log.flush(1.0)
    assert "Tag=t,0.000,1.000,760.319,HISTFAAAA" in stream.getvalue()


def test_overflow_is_clamped_and_counted() -> None:
    stream = io.StringIO()
    log = write_sample(stream)
    total = log.totals["ttft_response.chat"]
    assert (total.overflow, total.histogram.total_count) == (1, 4)
    assert total.histogram.max_value == HIGHEST_US
    assert stream.getvalue().endswith(
        "#[overflow: ttft_response.chat 1 above 1 h, clamped to it]\n"
    )
    log.record("itl.chat", 7200.0, count=3)
    log.flush(3.0)
    assert log.totals["itl.chat"].overflow == 3


def test_totals_keep_the_exact_maximum_and_zero_is_one_microsecond() -> None:
    log = IntervalLog(HlogWriter(io.StringIO(), START))
    log.record("t", 0.0)
    log.record("t", 0.760319)
    log.flush(1.0)
    assert log.totals["t"].histogram.max_value == 760_319
    assert log.totals["t"].histogram.min_value == 1


def test_a_value_recorded_during_a_flush_belongs_to_the_next_interval() -> None:
    stream = io.StringIO()
    log = IntervalLog(HlogWriter(stream, START))
    log.record("a", 0.001)
    log.record("b", 0.001)
    steps = 0
    for _ in log.flush_steps(1.0):
        log.record("b", 0.002)
        steps += 1
    log.flush(2.0)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("Tag=b")]
    assert [line.split(",")[1:4] for line in lines] == [
        ["0.000", "1.000", "1.000"],
        ["1.000", "1.000", "2.000"],
    ]
    assert log.totals["b"].histogram.total_count == 1 + steps


def test_the_buffer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hlog, "MAX_PENDING", 10)
    log = IntervalLog(HlogWriter(io.StringIO(), START))
    for _ in range(25):
        log.record("t", 0.001)
    log.record_each("t", [0.001] * 25)
    assert all(len(values) <= 10 for values in log._pending.values())
    log.record("t", 0.001, count=1 << 39)  # a server's claim must not size a buffer
    log.flush(1.0)
    assert log.totals["t"].histogram.total_count == 50 + (1 << 39)


@given(st.lists(st.integers(min_value=-5, max_value=5 * 10**9), min_size=64, max_size=300))
@settings(max_examples=60, deadline=None)
def test_bulk_recording_equals_recording_one_by_one(values: list[int]) -> None:
    assert "numpy" in sys.modules
    one, bulk = new_histogram(), new_histogram()
    overflow = hlog._record_bulk(numpy, bulk, array("q", values))
    assert overflow == sum(value > HIGHEST_US for value in values)
    for value in values:
        one.record_value(min(max(value, 1), HIGHEST_US))
    assert bulk.encode() == one.encode()
    assert (bulk.total_count, bulk.min_value, bulk.max_value) == (
        one.total_count,
        one.min_value,
        one.max_value,
    )


@pytest.mark.parametrize("power", range(10, 32))
def test_bulk_recording_at_bucket_edges(power: int) -> None:
    values = [value for value in (2**power - 1, 2**power, 2**power + 1) if value <= HIGHEST_US]
    one, bulk = new_histogram(), new_histogram()
    hlog._record_bulk(numpy, bulk, array("q", values))
    for value in values:
        one.record_value(value)
    assert counts(bulk) == counts(one)


@given(st.lists(st.floats(min_value=0, max_value=3600), min_size=1, max_size=50))
@settings(max_examples=30, deadline=None)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("hlog") / "x.hlog"
    with open(path, "w") as stream:
        log = IntervalLog(HlogWriter(stream, START))
        log.record_each("e2e.chat", values)
        log.close(1.25)
    (interval,) = read_hlog(path)["e2e.chat"]
    assert (interval.start_s, interval.length_s) == (0.0, 1.25)
    assert counts(interval.histogram) == counts(log.totals["e2e.chat"].histogram)


def test_reads_what_java_writes(tmp_path: Path) -> None:
    path = tmp_path / "java.hlog"
    path.write_text(JAVA_LOG)
    logs = read_hlog(path)
    assert list(logs) == ["", "A"]
    assert [interval.start_s for interval in (*logs[""], *logs["A"])] == [0.127, 1.134]
    histogram = logs["A"][0].histogram
    assert histogram.total_count == 741
    assert round(histogram.get_max_value() / 1e6, 3) == 2.769  # its Interval_Max, in ms of ns


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1.0,1.0,HISTFAAAA", "3 fields"),
        (f"x,1.0,1.0,{JAVA_PAYLOAD}", "'x' is not a start"),
        (f"1.0,-1,1.0,{JAVA_PAYLOAD}", "'-1' is not a length"),
        (f"1.0,nan,1.0,{JAVA_PAYLOAD}", "'nan' is not a length"),
        (f"Tag=a b,1.0,1.0,1.0,{JAVA_PAYLOAD}", "tag 'a b'"),
        (f"Tag=,1.0,1.0,1.0,{JAVA_PAYLOAD}", "tag ''"),
        ("1.0,1.0,1.0,", "no V2 compressed histogram"),
        ("1.0,1.0,1.0,HISTFAAAAEV4", "cannot be decoded"),
        (f"1.0,1.0,1.0,{JAVA_PAYLOAD[:-8]}", "cannot be decoded"),
        ("1.0,1.0,1.0,HISTFAAAABl42pNpmSzMwMDAyIAKYHwm+w9QFgA8ewJ6", "cannot be decoded"),
        ("rubbish", "1 fields"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "bad.hlog"
    path.write_text(f"#[comment]\n{line}\n")
    with pytest.raises(InputError, match=r"bad\.hlog:2: ") as error:
        read_hlog(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_hlog(tmp_path / "nothing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file"):
        read_hlog(tmp_path / "binary")


@pytest.mark.parametrize("tag", ["a b", "a,b", "a\nb"])
def test_a_tag_that_would_break_the_line_is_our_mistake(tag: str) -> None:
    with pytest.raises(ValueError, match="tag"):
        HlogWriter(io.StringIO(), START).write(tag, 0.0, 1.0, new_histogram())
