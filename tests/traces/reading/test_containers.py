"""A container is known by its first bytes; whatever the bytes are, they give rows or one line."""

import bz2
import gzip
import io
import json
import lzma
import sys
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from commands import printed, refusal
from paths import DATA

from forebay.traces.formats import detect, open_trace
from forebay.traces.formats.columns import mapped_format
from forebay.traces.formats.guess import guess
from forebay.traces.ground.errors import InputError
from forebay.traces.reading import containers, unpack
from forebay.traces.reading.containers import table_rows
from forebay.traces.reading.jsonl import read_trace
from forebay.traces.rows import FileFacts, RowError, SourceRow, shown

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

START = datetime(2026, 11, 26, 8, 0, 0, tzinfo=UTC)
CSV = b"arrival_time,prompt_tokens,completion_tokens\n0.5,100,7\n1.75,200,9\n"
TIMES: dict[str, tuple[Any, Any]] = {
    "timestamp with a zone": (pyarrow.timestamp("us", tz="UTC"), lambda at: START + at),
    "nanoseconds": (
        pyarrow.timestamp("ns"),
        lambda at: (int(START.timestamp()) * 1000 + at // timedelta(milliseconds=1)) * 10**6 + 1,
    ),
    "float seconds": (pyarrow.float64(), lambda at: at.total_seconds()),
    "epoch milliseconds": (
        pyarrow.int64(),
        lambda at: int(START.timestamp()) * 1000 + at // timedelta(milliseconds=1),
    ),
    "text": (pyarrow.string(), lambda at: (START + at).isoformat()),
}
CODECS: tuple[Any, ...] = ("none", "snappy", "zstd", "gzip")
WRITERS: tuple[dict[str, Any], ...] = (
    {"version": "1.0", "use_deprecated_int96_timestamps": True, "row_group_size": 100},
    {"version": "2.6", "data_page_version": "2.0", "use_dictionary": False},
    {"version": "2.6", "row_group_size": 50, "column_encoding": "PLAIN", "use_dictionary": False},
)


@pytest.mark.parametrize("writer", range(len(WRITERS)))
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", TIMES)
def test_parquet_of_any_writer_gives_its_times_and_lengths(
    kind: str, codec: Any, writer: int, tmp_path: Path
) -> None:
    dice = Random(f"{kind}{codec}{writer}")
    steps = sorted(dice.randrange(3_600_000) for _ in range(dice.randint(2, 500)))
    arrow, written = TIMES[kind]
    prompts = [dice.randint(1, 100_000) for _ in steps]
    answers = [dice.randint(0, 2000) for _ in steps]
    table = pyarrow.table(
        {
            "started": pyarrow.array([written(timedelta(milliseconds=at)) for at in steps], arrow),
            "prompt_tokens": pyarrow.array(prompts, pyarrow.int32()),
            "completion_tokens": answers,
            "team": [f"team\r{at % 7}" for at in steps],
        }
    )
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(table, path, compression=codec, **WRITERS[writer])
    assert detect(path) is None
    found = list(mapped_format(guess(path)).open(path))
    assert [one.arrival_s for one in found] == pytest.approx(
        [(at - steps[0]) / 1000 for at in steps], abs=2e-6
    )
    assert sorted(one.input_tokens for one in found) == sorted(prompts)
    assert sum(one.output_tokens for one in found) == sum(answers)
    assert {one.tenant for one in found} == {f"team\r{at % 7}" for at in steps}


@pytest.mark.parametrize("kind", ["timestamp", "naive", "float", "milliseconds", "text"])
@pytest.mark.parametrize("writer", ["duckdb", "fastparquet", "polars"])
def test_parquet_that_other_writers_wrote(writer: str, kind: str) -> None:
    """The files of tests/data/parquet, as `make.py` there wrote them."""
    steps = [at * at * 1_237 % 60_000 for at in range(12)]
    path = DATA / f"parquet/{writer}-{kind}.parquet"
    found = list(mapped_format(guess(path)).open(path))
    rows = sorted(
        ((at - min(steps)) / 1000, 100 + 7_919 * number % 90_000, number * 31 % 400)
        for number, at in enumerate(steps)
    )
    assert [one.arrival_s for one in found] == pytest.approx([at for at, _, _ in rows], abs=2e-6)
    assert [(one.input_tokens, one.output_tokens) for one in found] == [row[1:] for row in rows]
    assert {one.tenant for one in found} == {f"team\r{at}" for at in range(3)}


def arrow_file(stream: bool) -> bytes:
    table = pyarrow.table(
        {"arrival_time": [0.5, 1.75], "prompt_tokens": [100, 200], "completion_tokens": [7, 9]}
    )
    sink = io.BytesIO()
    make = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with make(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def zipped(*contents: bytes, names: tuple[str, ...] = ("0.csv", "1.csv")) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in zip(names, contents, strict=False):
            archive.writestr(name, content)
    return sink.getvalue()


CONTAINERS = {
    "gzip": gzip.compress(CSV),
    "gzip of two members": gzip.compress(CSV[:30]) + gzip.compress(CSV[30:]),
    "bzip2": bz2.compress(CSV),
    "xz": lzma.compress(CSV),
    "zstd": zstd.compress(CSV),
    "zip": zipped(CSV),
    "Arrow": arrow_file(stream=False),
    "Arrow stream": arrow_file(stream=True),
    "CR LF": CSV.replace(b"\n", b"\r\n"),
    "an old Mac's CR": CSV.replace(b"\n", b"\r"),
    "a byte order mark": b"\xef\xbb\xbf" + CSV,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_known_by_its_first_bytes(name: str, tmp_path: Path) -> None:
    """The suffix says nothing right here."""
    path = tmp_path / "x.log"
    path.write_bytes(CONTAINERS[name])
    found = list(mapped_format(guess(path)).open(path))
    assert [(one.arrival_s, one.input_tokens, one.output_tokens) for one in found] == [
        (0.0, 100, 7), (1.25, 200, 9),
    ]  # fmt: skip


MOONCAKE = b'{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]}\n'


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstd.compress])
def test_a_packed_file_is_recognised_and_its_end_is_checked(pack: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(pack(MOONCAKE * 3))
    assert detect(path) == "mooncake"
    assert len(list(open_trace(path))) == 3
    path.write_bytes(pack(Random(1).randbytes(300_000))[:-3])
    with pytest.raises(InputError, match="cut short; copy it again"):
        list(read_trace(path, skip_bad=True))


REFUSED = {
    "an Avro file": (b"Obj\x01\x02", "this is an Avro file; convert it to Parquet, CSV or"),
    "SQLite": (b"SQLite format 3\0" + bytes(99), "this is an SQLite database"),
    "an Excel file": (
        zipped(CSV, names=("[Content_Types].xml",)), "an Excel or Word file; save the table as CSV"
    ),
    "two files in a zip": (zipped(CSV, CSV), "a zip of 2 files; unpack it, and name one"),
    "text in UTF-16": (CSV.decode().encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
    "zeros": (bytes(4096), "this is a binary file of an unknown kind"),
    "CR inside a row": (b"a,b\rc\n1,2\n", "no time"),
    "Parquet cut at its end": (b"PAR1" + bytes(900), "not Parquet that can be read"),
    "Arrow cut at its end": (arrow_file(stream=False)[:-40], "not Arrow that can be read"),
    "damaged xz": (lzma.compress(CSV)[:20] + b"x" * 80, "damaged xz file"),
    "damaged zstd": (zstd.compress(CSV)[:12] + b"x" * 80, "zstd file"),
}  # fmt: skip


def test_a_suffix_that_the_first_bytes_deny(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(CSV)
    with pytest.raises(InputError, match=r"named \.parquet, but the file does not begin as such"):
        guess(tmp_path / "x.parquet")


# --- hostile files: one line, in bounded time and memory ---


def dictionary_bomb(rows: int = 60_000, text: int = 1_000_000) -> bytes:
    """One text for all rows: small on the disk, 60 GB when it is copied to each row."""
    words = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * rows, pyarrow.int32()), ["x" * text]
    )
    table = pyarrow.table(
        {
            "ts": [float(at) for at in range(rows)],
            "prompt_tokens": [5] * rows,
            "completion_tokens": [5] * rows,
            "note": words,
        }
    )
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink, compression="zstd", store_schema=False)
    return sink.getvalue()


def test_a_long_text_of_a_dictionary_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(dictionary_bomb())
    assert path.stat().st_size < 1_000_000
    before, most, held = pyarrow.total_allocated_bytes(), 0, []
    with open(path, "rb") as file:
        for number, row in table_rows(file, FileFacts()):
            if number <= 4000:
                held.append(row.values["note"])
            if number % 5000 == 0:
                most = max(most, pyarrow.total_allocated_bytes() - before)
    assert number == 60_000
    assert len(held[0]) == 1_000_000
    assert len(set(map(id, held))) == 1
    assert most < 100_000_000


HOSTILE = {
    "a million brackets": (b"[" * 1_000_000, "not JSON"),
    "brackets in a row": (b'{"a": ' + b"[" * 1_000_000, "not JSON"),
    "objects 100,000 deep in an array": (b'[{"a":' + b'{"a":' * 100_000, "not JSON"),
    "a million columns": (b",".join(b"c%d" % n for n in range(1_000_000)) + b"\n1\n",
                          "1,000,000 columns, over the limit of 10,000"),
    "a million keys": (json.dumps({f"c{n}": n for n in range(1_000_000)}).encode(),
                       "1,000,000 columns, over the limit of 10,000"),
    "a number of 5,000 digits in an array": (b'[{"ts": ' + b"9" * 5000 + b"}]", "not JSON"),
    "blanks only": (b" " * 5_000_000, "no text in the first 65,536 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, *HOSTILE])
def test_a_file_that_cannot_be_read_is_one_line(name: str, tmp_path: Path) -> None:
    content, says = (REFUSED | HOSTILE)[name]
    path = tmp_path / ("x.csv" if name in REFUSED else "x.log")
    path.write_bytes(content)
    said = refusal("traces", "import", "auto", path, "-o", tmp_path / "t.jsonl")
    assert says in said
    assert len(said) < 700


@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lzma.compress, zstd.compress, zipped]
)
def test_a_file_that_gets_much_too_long_is_refused(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "SURELY_SMALL_BYTES", 1 << 16)
    path = tmp_path / "x.csv"
    path.write_bytes(pack(CSV + b"0" * 3_000_000))
    with pytest.raises(InputError, match="gets more than 250 times longer than it is packed"):
        list(mapped_format(guess(path)).open(path))


def test_a_document_with_very_many_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "MOST_JSON_VALUES", 1000)
    for content in (
        b'{"a": [' + b"0," * 2000,
        b"[[" + b"0," * 2000,
        b'{"a": [' + b"0," * 2000 + b"1]}",
    ):
        with pytest.raises(Exception, match="more than 1,000 values"):
            first_row(content)


def first_row(content: bytes) -> SourceRow:
    _, row = next(table_rows(io.BytesIO(content), FileFacts()))
    if isinstance(row, RowError):
        raise row
    assert isinstance(row, SourceRow)
    return row


def test_nan_of_pythons_encoder_is_read(tmp_path: Path) -> None:
    for content in (b'{"a": NaN, "b": 2}\n', b'[{"a": NaN, "b": 2}]'):
        ((_, row),) = table_rows(io.BytesIO(content), FileFacts())
        assert isinstance(row, SourceRow)
        assert row.whole("b") == 2


def test_a_character_on_the_edge_of_a_piece_is_whole() -> None:
    text = "é" * 70_000
    ((_, row),) = table_rows(io.BytesIO(json.dumps([{"a": text}], ensure_ascii=False).encode()),
                             FileFacts())  # fmt: skip
    assert row.values == {"a": text}


LONG: dict[str, Any] = {
    "digits": 10**5000, "nested": [[[[[[10**5000]]]]]], "text": {"a": "x" * 10**6}, "1e300": 1e300,
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_a_value_in_an_error_is_short(name: str) -> None:
    assert len(shown(LONG[name])) <= 60


def test_a_time_of_300_digits_is_shortened(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = b'{"id":"%d","arrival_s":%s,"input_tokens":9,"output_tokens":1}\n'
    path.write_bytes(row % (1, b"1e300") + row % (2, b"0"))
    with pytest.raises(InputError, match=r"time goes back from 1e\+300 s to 0.000000 s"):
        list(read_trace(path))


def test_a_files_name_cannot_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31mred\nnew\u202e.csv"
    said = refusal("traces", "describe", path)
    assert "a\\x1b[31mred\\nnew\\u202e.csv: no such file" in said
    path.write_bytes(MOONCAKE)
    assert "\x1b" not in printed("traces", "describe", path)


def test_a_table_in_place_of_a_trace_names_the_import(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"ts": [0.5], "prompt_tokens": [7]}), path)
    said = refusal("traces", "describe", path)
    assert "traces import auto makes a trace of a table" in said
