"""Files of histograms and of the proxy, read as runs; and parts of a run's time."""

import base64
import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from commands import printed
from fakes.made_runs import answered, write_run
from hdrh.histogram import HdrHistogram
from paths import DATA

from forebay.analysis.compare.compare import compare, definition_notes
from forebay.analysis.compare.figures import figures
from forebay.analysis.compare.headline import headline
from forebay.analysis.runs.load import load_run, load_runs
from forebay.analysis.runs.merge_runs import merge_runs
from forebay.analysis.runs.sources.hdr_payload import decode_payload
from forebay.analysis.runs.sources.hlog import read_log
from forebay.analysis.runs.window import parse_between, parse_since
from forebay.traces.formats import open_trace
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import HlogWriter, IntervalLog, new_histogram

# ---- payloads


def counters(values: list[int]) -> Any:
    histogram = new_histogram()
    for value in values:
        histogram.record_value(value)
    used = histogram.get_counts_array_index(max(values)) + 1
    return histogram, np.frombuffer(histogram.counts, dtype=np.int64)[:used]


def v0(values: list[int], word: int) -> str:
    """As Java's `encodeIntoCompressedByteBuffer` of version 0 wrote it."""
    _, counts = counters(values)
    head = struct.pack(">iiqqq", 0x1C849308 | word << 4, 3, 1, 3_600_000_000, len(values))
    return packed(0x1C849309 | word << 4, head + counts.astype(f">i{word}").tobytes())


def v1(values: list[int], word: int) -> str:
    _, counts = counters(values)
    body = counts.astype(f">i{word}").tobytes()
    head = struct.pack(">iiiiqqd", 0x1C849301 | word << 4, len(body), 0, 3, 1, 3_600_000_000, 1.0)
    return packed(0x1C849302 | word << 4, head + body)


def packed(cookie: int, data: bytes) -> str:
    small = zlib.compress(data)
    return base64.b64encode(struct.pack(">II", cookie, len(small)) + small).decode()


VALUES = [1, 1, 900, 2_047, 2_048, 150_000, 3_599_999_999]


@pytest.mark.parametrize("word", [2, 4, 8])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_every_version_of_a_payload(version: int, word: int) -> None:
    histogram, _ = counters(VALUES)
    text = [v0, v1, lambda *_: histogram.encode().decode()][version](VALUES, word)
    found = decode_payload(text)
    assert (found.version, found.total) == (version, len(VALUES))
    exact = [histogram.get_highest_equivalent_value(value) for value in VALUES]
    assert np.repeat(found.values, found.counts).tolist() == exact


@pytest.mark.parametrize(
    "text",
    [
        "HISTFAAAA",
        "",
        "AAAA",
        packed(0x1C849309, b"\0" * 40),
        packed(0x1C849302, b""),
        "HISTFAAAAEV42pNpmSzMwMCgyAABTBDKT",
    ],
)
def test_damaged_payloads(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_payload(text)


# ---- logs of histograms


def own_log(path: Path, scale: float = 1.0) -> Path:
    with path.open("w") as stream:
        log = IntervalLog(HlogWriter(stream, 1_700_000_000.0))
        for second in range(4):
            for at in range(100):
                log.record("ttft_response.chat", scale * (second * 100 + at + 1) / 1e3)
                log.record("itl.chat", 0.01)
            log.record("reject.chat", 0.002)
            log.flush(second + 1.0)
        log.close(4.0)
    return path


def test_an_own_log_is_a_run(tmp_path: Path) -> None:
    run = load_run(own_log(tmp_path / "latency.hlog"))
    one = figures(run, "chat")
    assert (one.answered, one.rejected, one.intended) == (400, 4, 404)
    for name, share in (("p50", 50), ("p95", 95)):
        exact = np.percentile(np.arange(1, 401) / 1e3, share, method="inverted_cdf")
        assert one.latency["ttft"].values[name] == pytest.approx(exact, rel=1e-3)
    assert one.latency["ttft"].max == pytest.approx(0.4, abs=1e-6)
    assert one.latency["itl"].values["p90"] == pytest.approx(0.01, rel=1e-3)
    assert one.rates["output_tokens_per_s"] is None  # not counted is not 0
    assert run.info["started_unix_s"] == 1_700_000_000.0
    assert any("microseconds (as the file says)" in note for note in run.summary["warnings"])


@pytest.mark.parametrize(
    ("ratio", "unit", "seconds", "says"),
    [
        (1e6, None, 0.15, "nanoseconds (Interval_Max is a millionth"),
        (1e3, None, 150.0, "microseconds (Interval_Max is a thousandth"),
        (1.0, None, 150_000.0, "milliseconds (a guess"),
        (1e6, "us", 150.0, "microseconds (--unit)"),
    ],
)
def test_a_foreign_log_states_its_unit(
    tmp_path: Path, ratio: float, unit: str | None, seconds: float, says: str
) -> None:
    value = 150_000_000
    path = tmp_path / "ycsb.hlog"
    text = "".join(f"Tag=READ,{at},1.0,{value / ratio},{v1([value], 4)}\n" for at in range(30))
    path.write_text(f"#[StartTime: 1441812279.474 (seconds since epoch)]\n{text}oops,1\n")
    run = load_run(path, unit=unit)
    one = figures(run, "READ")
    assert one.latency["e2e"].values["p50"] == pytest.approx(seconds, rel=1e-3)
    notes = " ".join(run.summary["warnings"])
    assert says in notes
    assert "1 lines were not read, line 32: 2 fields" in notes
    assert "READ is not named: it is shown as E2E" in notes


@pytest.mark.parametrize(
    ("header", "stamp", "start_s"),
    [
        ("#[StartTime: 1000.0 (s)]\n#[BaseTime: 1000.0 (s)]\n", "2.000", 2.0),
        ("#[StartTime: 1000.0 (s)]\n#[BaseTime: 990.0 (s)]\n", "12.000", 2.0),
        ("#[StartTime: 1700000000.0 (s)]\n", "1700000002.000", 2.0),  # absolute
        ("#[StartTime: 1700000000.0 (s)]\n", "2.000", 2.0),  # a year before: relative
        ("", "5.000", 5.0),  # no header
    ],
)
def test_stamps_follow_the_java_reader(
    tmp_path: Path, header: str, stamp: str, start_s: float
) -> None:
    log = read_log(tmp_path, f"{header}{stamp},1.000,2.769,{v1(VALUES, 4)}\n")
    assert log.intervals[0].start_s == start_s


def test_two_foreign_logs_are_compared_by_what_they_have(tmp_path: Path) -> None:
    for name, value in (("a", 10_000_000), ("b", 40_000_000)):
        rows = "".join(f"{at}.0,1.0,{value / 1e6},{v0([value] * 20, 4)}\n" for at in range(20))
        (tmp_path / f"{name}.hlog").write_text(rows)
    runs = load_runs([tmp_path / "a.hlog", tmp_path / "b.hlog"], unit="ns")
    words = headline(compare(runs[0], runs[1]))
    assert words.summary.startswith("b.hlog is worse than a.hlog in untagged E2E")


RECORDED_US = [100 + i * i * 7_919 % 5_000_000 for i in range(2_000)]  # tests/data/histograms
LANGUAGES = ("java", "c", "js", "python", "go")


@pytest.mark.parametrize("language", [*LANGUAGES, "go-1.1"])
def test_logs_of_other_languages_have_equal_percentiles(language: str) -> None:
    run = load_run(DATA / f"histograms/{language}.hlog", unit="ns")
    assert run.info["started_unix_s"] == 1_700_000_000.0
    tagged = language in ("java", "js", "go", "go-1.1")
    second, fourth = RECORDED_US[500:1_000], RECORDED_US[1_500:]
    parts = {"untagged": RECORDED_US}
    if tagged:
        parts = {"chat": second + fourth, "untagged": RECORDED_US[:500] + RECORDED_US[1_000:1_500]}
    assert set(run.buckets()) == set(parts)
    for tag, values_us in parts.items():
        theirs = HdrHistogram(1, 3_600_000_000_000, 3)
        for value_us in values_us:
            theirs.record_value(1_000 * value_us)
        found = figures(run, tag).latency["e2e"]
        assert found.count == len(values_us)
        for name, percent in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
            exact = theirs.get_value_at_percentile(percent)
            assert found.values[name] == pytest.approx(exact / 1e9, abs=1.1e-9), (tag, name)


@pytest.mark.parametrize("language", LANGUAGES)
def test_distributions_of_other_languages_have_their_own_rows(language: str) -> None:
    path = DATA / f"histograms/{language}.hgrm"
    run = load_run(path)
    ordered = np.sort(run.numbers["e2e_response_s"])
    assert len(ordered) == len(RECORDED_US)
    rows = [line.split() for line in path.read_text().splitlines() if line[:1] == " "][1:]
    assert len(rows) > 30
    for value_ms, _, total, *_ in rows:
        assert ordered[int(total) - 1] == pytest.approx(float(value_ms) / 1e3, abs=1e-9)


def test_the_base_time_as_hdrhistogram_go_1_1_spells_it(tmp_path: Path) -> None:
    text = (DATA / "histograms/go-1.1.hlog").read_text()
    lines = [line for line in text.splitlines() if "StartTime:" not in line]
    (tmp_path / "a.hlog").write_text("\n".join(lines))
    assert load_run(tmp_path / "a.hlog", unit="ns").info["started_unix_s"] == 1_700_000_000.0


@pytest.mark.parametrize("text", ["#[nothing]\n", "#\n1,2,3,HISTFAAAA\n"])
def test_a_log_without_an_interval(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.hlog").write_text(text)
    with pytest.raises(InputError, match="holds no interval of a histogram log"):
        load_run(tmp_path / "a.hlog")


def test_hgrm(tmp_path: Path) -> None:
    path = tmp_path / "wrk.hgrm"
    path.write_text(
        "       Value     Percentile TotalCount 1/(1-Percentile)\n\n"
        "       1.500 0.000000000000         10           1.00\n"
        "       2.500 0.500000000000         50           2.00\n"
        "       9.000 1.000000000000        100\n"
        "#[Mean    =        5.000, StdDeviation   =        1.000]\n"
    )
    one = figures(load_run(path), "untagged")
    values = one.latency["e2e"].values
    assert (one.answered, values["p50"]) == (100, 0.0025)
    assert values["p90"] == pytest.approx(0.009)
    assert figures(load_run(path, unit="s"), "untagged").latency["e2e"].max == 9.0


# ---- the proxy's files


def ledger_line(number: int, **more: Any) -> dict[str, Any]:
    stamp = f"2026-11-{10 + number // 100:02d}T10:{number % 60:02d}:00.000+00:00"
    line = {
        "time": stamp, "request_id": f"r{number}", "tenant": "acme", "model": "m",
        "operation": "chat", "bucket": "chat", "backend": "gpu0", "status": 200, "counted": True,
        "prompt_tokens": 100, "cached_tokens": 40, "output_tokens": 11, "queue_ms": 5.0,
        "ttft_ms": 120.0, "duration_ms": 1_120.0,
    }  # fmt: skip
    return line | more


def written(path: Path, lines: list[dict[str, Any]], end: bytes = b"") -> Path:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines) + end)
    return path


def test_a_packed_ledger_is_a_run(tmp_path: Path) -> None:
    lines = [ledger_line(99, operation="other"), *map(ledger_line, range(40))]
    lines.append(ledger_line(41, status=502, reason="upstream_error", ttft_ms=None))
    plain = written(tmp_path / "usage.jsonl", lines, end=b'{"time": "torn')
    packed = tmp_path / "usage.jsonl.1.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    run = load_run(packed)
    one = figures(run, "chat")
    assert (one.answered, one.failed, one.hit_ratio) == (40, 1, 0.4)
    assert one.latency["ttft"].values["p50"] == 0.12
    assert one.latency["e2e"].values["p50"] == 1.12
    assert one.latency["tpot"].values["p50"] == pytest.approx(0.1)
    assert one.latency["queue"].values["p50"] == 0.005
    assert run.words["request_id"].tolist()[:2] == ["r0", "r1"]
    assert run.words["tenant"].tolist()[0] == "acme"
    assert "rejections" in run.summary["warnings"][0]
    assert "the last line was not read, as it is cut" in run.summary["warnings"][1]


def test_the_request_log_counts_rejections(tmp_path: Path) -> None:
    about = {"level": "info", "message": "request", "event": "request", "service_class": "standard"}
    lines: list[dict[str, Any]] = [{"time": "2026-11-10T09:00:00Z", "event": "listening"}]
    lines += [ledger_line(number) | about for number in range(3)]
    lines.append(ledger_line(3, status=429, reason="queue_full", ttft_ms=None) | about)
    lines.append(ledger_line(4, status=499, ttft_ms=None) | about)
    lines.append(ledger_line(5, operation="other", bucket="none") | about)  # no inference
    run = load_run(written(tmp_path / "proxy.log", lines))
    assert run.words["outcome"].tolist() == ["ok"] * 3 + ["rejected", "failed"]
    assert run.words["reason"].tolist()[3:] == ["queue_full", "cancelled"]
    assert (run.info["made_by"], run.requests) == ("request log", 5)


def test_a_log_without_a_usable_request_is_one_line(tmp_path: Path) -> None:
    start = {"time": "2026-11-10T09:00:00Z", "event": "listening"}
    with pytest.raises(InputError, match="no line is an ended request"):
        load_run(written(tmp_path / "a.log", [start, start]))
    with pytest.raises(InputError, match="a figure of a request is no number"):
        load_run(written(tmp_path / "b.log", [start, ledger_line(1, queue_ms="soon")]))
    with pytest.raises(InputError, match=r"c\.log:2: not JSON"):
        load_run(written(tmp_path / "c.log", [start], end=b"{torn\n" + orjson.dumps(start)))


def test_one_week_is_compared_with_another(tmp_path: Path) -> None:
    path = written(
        tmp_path / "usage.jsonl",
        [ledger_line(number, ttft_ms=100.0 if number < 200 else 300.0) for number in range(400)],
    )
    weeks = ("--between", "2026-11-10..2026-11-12", "--between", "2026-11-12..2026-11-20")
    told = orjson.loads(printed("compare", path, *weeks, "--json"))
    by_key = {(figure["section"], figure["key"]): figure for figure in told["figures"]}
    p90 = by_key["chat", "ttft_p90"]
    assert (p90["a"], p90["b"]) == (0.1, 0.3)
    assert by_key["run", "attainment"]["a"] == 1.0  # judged anew for the part
    assert told["mood"] == "worse" or "cannot" in told["headline"] or told["mood"] == "doubtful"


@pytest.mark.parametrize(
    ("text", "count"), [("..5s", 50), ("5s..", 50), ("2s..3s", 10), ("2026-11-21T10:00:05Z..", 50)]
)
def test_a_part_of_a_run(tmp_path: Path, text: str, count: int) -> None:
    rows = [answered(at, "chat", at * 0.1, 0.1) for at in range(100)]
    info = {"started_unix_s": 1_795_255_200.0}  # 2026-11-21T10:00:00Z
    (run,) = load_runs([write_run(tmp_path / "r", rows, info=info)], [parse_between(text)])
    assert run.requests == count
    assert figures(run, "chat").attainment == 1.0


def test_since_counts_back_from_the_end(tmp_path: Path) -> None:
    rows = [answered(at, "chat", at * 1.0, 0.1) for at in range(100)]
    path = write_run(tmp_path / "r", rows)
    (run,) = load_runs([path], [parse_since("9s")])
    assert run.requests == 10
    with pytest.raises(InputError, match="does not say when it was"):
        load_runs([path], [parse_since("2026-11-21")])
    with pytest.raises(InputError, match="no request was due in 500s"):
        load_runs([path], [parse_between("500s..")])


@pytest.mark.parametrize("text", ["", "..", "5s", "yesterday..", "2026-13-01.."])
def test_bad_windows(text: str) -> None:
    with pytest.raises(InputError, match="--between"):
        parse_between(text)


# ---- results of other tools

VLLM = {
    "request_throughput": 1.0, "input_lens": [100], "output_lens": [3], "itls": [[0.02, 0.04]],
    "start_times": [50.0], "errors": [""],
}  # fmt: skip


def test_an_appended_file_holds_several_results(tmp_path: Path) -> None:
    path = written(tmp_path / "result.json", [VLLM | {"ttfts": [ttft]} for ttft in (0.1, 0.2, 0.3)])
    for name, ttft_s in (("result.json", 0.3), ("result.json#1", 0.1), ("result.json#2", 0.2)):
        run = load_run(tmp_path / name)
        assert run.numbers["ttft_service_s"].tolist() == [ttft_s]
    assert "result 3 of 3 in the file" in " ".join(load_run(path).summary["warnings"])
    with pytest.raises(InputError, match="holds 3 results"):
        load_run(tmp_path / "result.json#4")


def test_an_import_chooses_a_result_too(tmp_path: Path) -> None:
    """Two results in one file lay over one another."""
    results = [VLLM | {"ttfts": [0.1], "input_lens": [tokens]} for tokens in (100, 200)]
    path = written(tmp_path / "result.json", results)
    with pytest.raises(InputError, match="the first one's; FILE#1, FILE#2 and so on choose one"):
        list(open_trace(path))
    for number, tokens in ((1, 100), (2, 200)):
        assert [row.input_tokens for row in open_trace(f"{path}#{number}")] == [tokens]
    with pytest.raises(InputError, match="#3: the file holds 2 results, from #1"):
        list(open_trace(f"{path}#3"))
    request = {"start_time": 1.0, "prompt_tokens": 7, "output_tokens": 3}
    groups = [{"successful": [request | {"prompt_tokens": tokens}]} for tokens in (7, 8, 9)]
    path = written(tmp_path / "g.json", [{"benchmarks": [{"requests": group} for group in groups]}])
    assert [row.input_tokens for row in open_trace(f"{path}#2")] == [8]
    nginx = written(tmp_path / "nginx.json", [{"status": 200, "body_bytes_sent": 1, "msec": 1}])
    with pytest.raises(InputError, match="nginx has no results to choose from"):
        open_trace(f"{nginx}#1")


def test_definitions_that_differ_stand_beside_the_figure(tmp_path: Path) -> None:
    path = written(tmp_path / "result.json", [VLLM | {"ttfts": [0.1]}])
    rows = [answered(at, "chat", at * 0.1, 0.1) for at in range(30)]
    runs = load_runs([write_run(tmp_path / "r", rows), path])
    found = compare(runs[0], runs[1])
    labels = {line.key: line.label for line in found.lines if line.section == "chat"}
    assert labels["tpot_max"] == "TPOT max *"
    assert labels["e2e_max"] == "E2E max"
    notes = " ".join(definition_notes([found]))
    assert "* TPOT of result.json (vllm bench serve): (E2E - TTFT) / (output tokens - 1)." in notes


# ---- merging


def test_files_are_merged_like_folders(tmp_path: Path) -> None:
    own = [own_log(tmp_path / name, scale) for name, scale in (("a.hlog", 1.0), ("b.hlog", 2.0))]
    merge_runs(own, tmp_path / "logs")
    one = figures(load_run(tmp_path / "logs"), "chat")
    exact = np.concatenate([np.arange(1, 401) / 1e3, np.arange(1, 401) / 500])
    p95 = float(np.percentile(exact, 95, method="inverted_cdf"))
    assert one.latency["ttft"].values["p95"] == pytest.approx(p95, rel=2e-3)
    days = [
        written(tmp_path / f"{first}.jsonl", [ledger_line(at) for at in range(first, first + 60)])
        for first in (0, 100)
    ]
    merge_runs(days, tmp_path / "days")
    run = load_run(tmp_path / "days")
    assert (run.requests, run.words["tenant"].tolist()[0]) == (120, "acme")
