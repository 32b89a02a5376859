"""analysis/runs/load.py: files of others are known by content, bounded, and printed clean."""

import base64
import json
import os
import struct
import zlib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from commands import forebay, refusal, remarks
from fakes.made_runs import answered, write_run

from forebay.analysis.compare.compare import compare
from forebay.analysis.compare.headline import headline
from forebay.analysis.runs.load import load_run
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import new_histogram

TABLE = """{header}
{values}
#[Mean    =        5.000, StdDeviation   =        1.000]
"""
VALUES = "\n".join(f"{at + 1}.0 {at / 3:.12f} {count} 1.00" for at, count in
                   enumerate((1_000, 1_900, 2_000)))  # fmt: skip
HEADER = "       Value     Percentile TotalCount 1/(1-Percentile)\n"
VEGETA = "Value(us)      Percentile    TotalCount    1/(1-Percentile)"


def payload(*values: int) -> str:
    histogram = new_histogram()
    for value in values:
        histogram.record_value(value)
    return str(histogram.encode().decode())


@pytest.mark.parametrize("name", ["a.hgrm", "a.txt", "a.hdr", "a"])
@pytest.mark.parametrize(("header", "unit_s"), [(HEADER, 1e-3), (VEGETA, 1e-6)])
def test_a_percentile_table_is_known_by_its_content(
    header: str, unit_s: float, name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(TABLE.format(header=header, values=VALUES))
    run = load_run(path)
    assert run.requests == 2_000
    assert run.numbers["e2e_response_s"].max() == pytest.approx(3 * unit_s)
    said = remarks("report", path, "--out", tmp_path / "r.html")
    assert "untagged: end-to-end latency p50 " in said
    assert "2,000 values." in said
    assert "answered" not in said
    assert "a percentile distribution is no trace" in refusal("traces", "import", "auto", path)


def test_tables_have_no_times_so_no_interval(tmp_path: Path) -> None:
    for name in ("a.hgrm", "b.hgrm"):
        (tmp_path / name).write_text(TABLE.format(header=HEADER, values=VALUES))
    compared = compare(load_run(tmp_path / "a.hgrm"), load_run(tmp_path / "b.hgrm"))
    words = headline(compared)
    assert "answered every request" not in words.summary
    assert "interval" not in " ".join(words.points)
    line = compared.line("untagged", "e2e_p90")
    assert line is not None
    assert line.better == "equal"
    # It was the number of samples in one second.
    assert "requests_per_s" not in [line.key for line in compared.lines]


def test_stamps_of_go_are_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "go.hlog"
    lines = (
        f"1762423{at}00.000,1762423{at + 10}00.000,10.9,{payload(900)}\n" for at in (2000, 2010)
    )
    path.write_text("#[Histogram log format version 1.3]\n" + "".join(lines))
    words = ("report", path, "--unit", "us", "--out", tmp_path / "r.html")
    assert "in milliseconds" in remarks(*words, "--between", "0s..2s")
    assert load_run(path).info["started_unix_s"] == 1_762_423_200.0
    path.write_text(f"1e300,1.0,10.9,{payload(900)}\n")
    with pytest.raises(InputError, match="a stamp is no time in seconds"):
        load_run(path)


def test_a_histogram_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    packer = zlib.compressobj(9)
    head = struct.pack(">iiiiqqd", 0x1C849313, 2**31 - 1, 0, 3, 1, 3_600_000_000, 1.0)
    packed = packer.compress(head + bytes(80 << 20)) + packer.flush()
    raw = struct.pack(">II", 0x1C849314, len(packed)) + packed
    path = tmp_path / "bomb.hlog"
    path.write_text(f"#[StartTime: 1]\n0.0,1.0,10.9,{base64.b64encode(raw).decode()}\n")
    with pytest.raises(InputError, match="a histogram of more than 64 MiB"):
        load_run(path)


def test_a_log_of_countless_tags_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "tags.hlog", payload(5)
    path.write_text("".join(f"Tag=t{at},0.0,1.0,0.005,{text}\n" for at in range(1_100)))
    with pytest.raises(InputError, match="more than 1,000 tags"):
        load_run(path)


def test_long_equal_words_of_a_run_are_read_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [answered(0, "chat", 0.0, 0.1)])
    table = pyarrow.parquet.read_table(folder / "requests.parquet")
    many = 20_000
    columns = {name: pyarrow.array([table.column(name)[0].as_py()] * many, table.column(name).type)
               for name in table.column_names}  # fmt: skip
    index = pyarrow.array([0] * many, pyarrow.int32())
    columns["tenant"] = pyarrow.DictionaryArray.from_arrays(index, ["x" * 1_000_000])
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "requests.parquet")
    summary = json.loads((folder / "summary.json").read_text()) | {"requests": many}
    (folder / "summary.json").write_text(json.dumps(summary))
    tenants = load_run(folder).words["tenant"]
    assert len({id(word) for word in tenants}) == 1


@pytest.mark.parametrize("name", ["run.json", "summary.json", "requests.parquet"])
def test_a_pipe_in_a_run_folder_is_one_line(name: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [answered(0, "chat", 0.0, 0.1)])
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(InputError, match="no file but a pipe or device"):
        load_run(folder)


LINE = {"time": "2026-01-05T10:00:00Z", "request_id": "r", "status": 200, "duration_ms": 500,
        "ttft_ms": 100, "prompt_tokens": 10, "output_tokens": 5, "tenant": "t"}  # fmt: skip
BAD = "\x1b]0;pwn\x07\x1b[2J\u202e"


def test_names_of_others_are_cleaned_where_they_are_read(tmp_path: Path) -> None:
    ledger, log = tmp_path / "a.jsonl", tmp_path / "a.hlog"
    ledger.write_text("".join(json.dumps(LINE | {"bucket": BAD}) + "\n" for _ in range(3)))
    log.write_text(f"#[StartTime: 1]\nTag={BAD},0.0,1.0,10.9,{payload(900)}\n")
    for path in (ledger, log):
        done = forebay("compare", path, path)
        assert done.returncode == 0
        assert not any(letter in done.stdout + done.stderr for letter in "\x1b\x07\u202e")


def test_python_writes_nan_into_a_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [answered(0, "chat", 0.0, 0.1)])
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace("{", '{"mean_ms": NaN, ', 1))
    assert load_run(folder).requests == 1
