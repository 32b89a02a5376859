"""Bad files get one line: file, row, reason and remedy. Nothing is lost silently."""

import gzip
from pathlib import Path

import pytest
from commands import refusal, remarks
from paths import TESTS

from forebay.traces.edit.edit import cap
from forebay.traces.formats import ReadOptions, open_trace
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.trace_line import row_bytes
from forebay.traces.reading import containers
from forebay.traces.reading.jsonl import parse_row
from forebay.traces.reading.reader import Order, TraceReader

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = b'{"timestamp": %d, "input_length": 600, "output_length": 1, "hash_ids": [0, %d]}\n'
OPENAI = b'{"timestamp": %s, "id": "%s", "request": {"prompt": "Hello"}, "response": %s}\n'
CASES = {
    "a gzip file that is cut short": (
        "mooncake",
        gzip.compress(b"".join(MOONCAKE % (n, n + 1) for n in range(2000)))[:-300],
        "the gzip file is cut short; copy it again",
    ),
    "an HTML page in place of a trace": (
        "azure",
        b"<!doctype html><html>Sign in</html>",
        ":1: this is an HTML page, not a trace; download the file again",
    ),
    "seconds, then milliseconds": (
        "openai-log",
        OPENAI % (b"1764000000", b"a", b'"x"') + OPENAI % (b"1764000001000", b"b", b'"x"'),
        ":2: timestamp: 1764000001000 looks like ms, the rows before are in s; convert them",
    ),
    "a file of another format": (
        "azure",
        MOONCAKE % (0, 1),
        ":1: TIMESTAMP: no such column in this row, or nothing in it; the file does not look like "
        "azure: traces import auto finds the format",
    ),
    "a file of another format in place of a folder": (
        "kv-cache-tester",
        MOONCAKE % (0, 1),
        "the file does not look like kv-cache-tester: traces import auto finds the format",
    ),
    "times with and without an offset": (
        "azure",
        AZURE + b"2024-05-10 00:00:00+00:00,5,5\n2024-05-10 02:00:01,5,5\n",
        ":3: TIMESTAMP: 2024-05-10T02:00:01 has no UTC offset, the rows before had one; write",
    ),
    "a clock that jumps back": (
        "azure",
        AZURE + b"2024-05-10 00:00:09,5,5\n2024-05-10 00:00:01,5,5\n",
        "sort the rows by arrival (traces import --sort)",
    ),
    "a date in another century": (
        "azure",
        AZURE + b"1970-01-01 00:00:09,5,5\n2024-05-10 00:00:01,5,5\n",
        ":3: 19,853 days after the row before; are units of time mixed? convert them to one",
    ),
    "an id that occurs twice": (
        "openai-log",
        OPENAI % (b"1764000000", b"a", b'"x"') + OPENAI % (b"1764000001", b"a", b'"x"'),
        ":2: id 'a' occurs twice; give each request its own",
    ),
    "a quotation mark that is never closed": (
        "azure",
        AZURE + b'2024-05-10 00:00:00,5,"5\n2024-05-10 00:00:01,5,5\n',
        ":2: not CSV (unexpected end of data); is a quotation mark left open or not doubled?",
    ),
    "a JSON array that is cut short": (
        "sharegpt",
        b'[{"id": "a", "conversations": [{"from": "human", "value": "Hi"}',
        "item 1: not JSON (the array ends inside it); is the file whole?",
    ),
    "Parquet that is cut short": ("azure", b"PAR1\x00\x01", "is the file whole?"),
    "a log without lengths": (
        "nginx",
        b'1.1.1.1 - - [24/Nov/2026:02:47:05 +0000] "POST /v1/completions HTTP/1.1" 200 9 "-" "-"\n',
        "no number of input tokens and no prompt; log them, or give --input-tokens for all rows",
    ),
    "only rows that are no requests": (
        "nginx",
        b'1.1.1.1 - - [24/Nov/2026:02:47:05 +0000] "GET /health HTTP/1.1" 200 9 "-" "-"\n',
        "no requests in this trace: 1 GET /health, which generates no text; check that it is the",
    ),
    "turns that may or may not hold their history": (
        "mooncake-sessions",
        b'{"session_id": "a", "timestamp": 0, "input_length": 5, "output_length": 1}\n'
        b'{"session_id": "a", "delay": 9, "input_length": 8, "output_length": 1}\n',
        "add --mode cumulative or --mode delta",
    ),
}


@pytest.mark.parametrize(("name", "content", "says"), CASES.values(), ids=CASES)
def test_a_bad_file_is_one_line(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    path, out = tmp_path / "raw", tmp_path / "t.jsonl"
    path.write_bytes(content)
    words = ["traces", "import", name, str(path), "-o", str(out), "--tokens", "estimate"]
    said = refusal(*words)
    assert said.startswith(f"forebay traces: {path}:")
    assert says in said
    assert [one.name for one in tmp_path.iterdir()] == ["raw"]


def test_a_line_without_an_end_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of 64 MiB is lowered here; the rest of a 10 GB line is read past in pieces."""
    monkeypatch.setattr(containers, "MAX_LINE_BYTES", 4096)
    path = tmp_path / "raw"
    path.write_bytes(MOONCAKE % (0, 1) + b"{" + b"x" * 100_000 + b"\n" + MOONCAKE % (1, 2))
    with pytest.raises(InputError, match=r"raw:2: line over 4096 bytes; is this one request a li"):
        list(open_trace(path, format_name="mooncake"))
    reader = open_trace(path, format_name="mooncake", skip_bad=True)
    assert [one.arrival_s for one in reader] == [0.0, 0.001]
    assert reader.skipped == 1


def test_a_text_of_a_csv_keeps_its_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(b'prompt,output_tokens\r\n"one\n\n  two ",5\r\n   \r\nthree,6\r\n')
    rows = list(open_trace(path, options=ReadOptions(tokens="estimate")))
    assert [row.text for row in rows] == ["one\n\n  two ", "three"]


def test_a_csv_with_a_byte_order_mark_and_semicolons_is_read(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(b"\xef\xbb\xbfarrived_at;num_prefill_tokens;num_decode_tokens\r\n0,5;9;1\r\n")
    (only,) = open_trace(path)
    assert (only.arrival_s, only.input_tokens) == (0.5, 9)


def test_a_clock_that_was_set_back_is_sorted_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(AZURE + b"2024-05-10 00:00:09,5,5\n2024-05-10 00:00:01,6,5\n")
    rows = open_trace(path, format_name="azure", options=ReadOptions(sort=True))
    assert [(row.arrival_s, row.input_tokens) for row in rows] == [(0.0, 6), (8.0, 5)]


def test_every_row_that_is_left_out_is_counted(tmp_path: Path) -> None:
    """Two bad rows, one row that is no request, and one with images: nothing goes unsaid."""
    path = tmp_path / "raw"
    path.write_bytes(
        b"TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,2,5,5\n"
        b"2024-05-10 00:00:01,0,none,5\n2024-05-10 00:00:02,0,0,5\n"
    )
    said = remarks("traces", "import", "azure", path, "-o", tmp_path / "t", "--skip-bad")
    assert "note: 1 rows with images" in said
    assert f"2 bad rows skipped; the first: {path}:3: ContextTokens: 'none'" in said
    nginx = TESTS / "traces" / "golden" / "nginx.log"
    said = remarks("traces", "import", "auto", nginx, "-o", tmp_path / "n")
    assert "not requests: 1 GET /metrics, which generates no text" in said


def test_a_trace_beyond_the_context_is_cut_or_dropped(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(MOONCAKE % (0, 1))
    (cut,) = cap(open_trace(path), context=512)
    assert (cut.input_tokens, cut.output_tokens, cut.blocks) == (511, 1, (0,))
    assert list(cap(open_trace(path), context=512, drop=True)) == []


def test_a_log_is_sorted_within_a_bound(tmp_path: Path) -> None:
    """Three rows are held here, 50,000 in a log: one that is later than that is an error."""

    def read(*times_s: float) -> list[float]:
        path = tmp_path / "raw"
        path.write_bytes(
            b"".join(row_bytes(TraceRequest(f"r{n}", t, 1, 1)) for n, t in enumerate(times_s))
        )
        return [one.arrival_s for one in TraceReader(path, parse_row, order=Order(True, 3))]

    assert read(4.0, 3.0, 2.0, 5.0, 6.0) == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(InputError, match=r":6: time goes back from 3\.0+ s to 1\.0+ s; sort the"):
        read(2.0, 3.0, 4.0, 5.0, 6.0, 1.0)
