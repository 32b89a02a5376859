"""The trace format: reading, writing, and the one line that a malformed row gets."""

import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import DATA

from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.trace_line import row_bytes
from forebay.traces.reading.jsonl import parse_row, read_trace, write_trace
from forebay.traces.rows import RowError

GOOD = b'{"id":"a","arrival_s":0,"input_tokens":9,"output_tokens":1}'

GOLDEN = [
    TraceRequest("plain", 0.0, 4808, 10),
    TraceRequest("blocks", 0.25, 1500, 64, blocks=(0, 1, 2**64 - 1)),
    TraceRequest("small-blocks", 0.25, 33, 0, blocks=(7, 8, 9), block_tokens=16),
    TraceRequest(
        "text",
        1.5,
        6,
        1,
        text="Wie heißt der Fluß?\n",
        session="user-1",
        tenant="acme",
        document="flüsse.pdf",
    ),
]


def test_golden_file_reads_and_writes_byte_for_byte(tmp_path: Path) -> None:
    golden = DATA / "traces_forebay.jsonl"
    assert list(read_trace(golden)) == GOLDEN
    assert write_trace(tmp_path / "t.jsonl", GOLDEN) == len(GOLDEN)
    assert (tmp_path / "t.jsonl").read_bytes() == golden.read_bytes()


@st.composite
def requests(draw: st.DrawFn) -> TraceRequest:
    words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    input_tokens = draw(st.integers(1, 5_000))
    block_tokens = draw(st.sampled_from([16, 512, 700]))
    kind = draw(st.sampled_from(["blocks", "text", "messages", "lengths"]))
    count = -(-input_tokens // block_tokens)
    ids = st.lists(st.integers(0, 2**64 - 1), min_size=count, max_size=count)
    return TraceRequest(
        id=draw(words.filter(bool)),
        arrival_s=draw(st.floats(0, 1e9)),
        input_tokens=input_tokens,
        output_tokens=draw(st.integers(0, 10**6)),
        blocks=tuple(draw(ids)) if kind == "blocks" else None,
        block_tokens=block_tokens,
        text=draw(words) if kind == "text" else None,
        session=draw(st.none() | words),
        tenant=draw(st.none() | words),
        document=draw(st.none() | words),
        service_class=draw(st.sampled_from([None, "interactive", "standard", "batch"])),
        parent=draw(st.none() | words),
        waits_for=tuple(draw(st.lists(words, max_size=2))),
        think_s=draw(st.none() | st.floats(0, 1e6)),
        messages=({"role": "user", "content": draw(words)},) if kind == "messages" else None,
        tools=draw(st.sampled_from([None, ({"type": "function"},)])),
        model=draw(st.none() | words),
        stream=draw(st.booleans()),
        parameters=draw(st.sampled_from([None, {"stop": ["\n"], "temperature": 0.5}])),
        deadline_s=draw(st.none() | st.floats(0, 1e6)),
        status=draw(st.sampled_from([None, 200, 429])),
    )


@given(requests())
def test_every_request_survives_the_round_trip(request: TraceRequest) -> None:
    line = row_bytes(request)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert parse_row(line) == request


def _with(change: bytes) -> bytes:
    return GOOD[:-1] + b"," + change + b"}"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "[1] is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b"{}", "id: missing; give a string of at least one character"),
        (_with(b'"id":7'), "id: 7 is not a string"),
        (_with(b'"id":""'), "id: '' is not a string of at least one character"),
        (_with(b'"arrival_s":"now"'), "arrival_s: 'now' is not a time"),
        (_with(b'"arrival_s":-1'), "arrival_s: -1 is not a time of 0 or more"),
        (_with(b'"arrival_s":true'), "arrival_s: True is not a time"),
        (_with(b'"arrival_s":1e999'), "not JSON"),
        (_with(b'"arrival_s":NaN'), "not JSON"),
        (_with(b'"input_tokens":0'), "input_tokens: 0 is not a whole number of 1 or more"),
        (_with(b'"input_tokens":1.5'), "input_tokens: 1.5 is not a whole number"),
        (_with(b'"output_tokens":-1'), "output_tokens: -1 is not a whole number of 0 or more"),
        (_with(b'"block_tokens":0'), "block_tokens: 0 is not a whole number of 1 or more"),
        (_with(b'"blocks":7'), "blocks: 7 is not a list"),
        (_with(b'"blocks":[-1]'), "blocks: -1 is not a block id"),
        (_with(b'"blocks":[true]'), "blocks: True is not a block id"),
        (_with(b'"blocks":[18446744073709551616]'), "is not a block id"),
        (_with(b'"blocks":[]'), "0 ids for 9 tokens; blocks of 512 tokens make 1"),
        (_with(b'"blocks":[1,2]'), "2 ids for 9 tokens"),
        (_with(b'"blocks":[1],"text":"x"'), "both text and blocks"),
        (_with(b'"messages":[{}],"text":"x"'), "messages beside text or blocks"),
        (_with(b'"messages":["x"]'), "is not a list of objects"),
        (_with(b'"waits_for":"a"'), "waits_for: 'a' is not a list of ids"),
        (_with(b'"think_s":-1'), "think_s: -1 is not a time of 0 or more"),
        (_with(b'"stream":1'), "stream: 1 is not true or false"),
        (_with(b'"parameters":[]'), "parameters: [] is not an object"),
        (_with(b'"status":600'), "status: 600 is not an HTTP status"),
        (_with(b'"tenant":5'), "tenant: 5 is not a string"),
        (_with(b'"service_class":"fast"'), "'fast' is not interactive, standard or batch"),
        (_with(b'"text":"\\ud800"'), "not JSON"),
        (_with(b'"bloks":[1]'), "unknown key 'bloks'; the keys are id, arrival_s"),
    ],
)
def test_a_bad_row_says_file_line_and_what_is_wrong(row: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD + b"\n\n" + row + b"\n" + GOOD.replace(b'"a"', b'"b"') + b"\n")
    with pytest.raises(InputError) as error:
        list(read_trace(path))
    assert str(error.value).startswith(f"{path}:3: ")  # the blank line counts as a line
    assert says in str(error.value)
    assert "\n" not in str(error.value)

    reader = read_trace(path, skip_bad=True)
    assert [request.id for request in reader] == ["a", "b"]
    assert (reader.rows, reader.skipped) == (2, 1)
    assert reader.first_skipped == str(error.value)


def test_an_id_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(GOOD.replace(b'"a"', b'"%d"' % n) + b"\n" for n in range(5000)))
    assert sum(1 for _ in read_trace(path)) == 5000
    with open(path, "ab") as file:
        file.write(GOOD.replace(b'"a"', b'"17"'))
    with pytest.raises(InputError, match=r":5001: id '17' occurs twice; give each request its own"):
        list(read_trace(path))


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_a_row_error(line: bytes) -> None:
    with suppress(RowError):
        parse_row(line)


def test_time_going_back_is_an_error_or_a_skipped_row(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    late, early = TraceRequest("late", 5.0, 1, 1), TraceRequest("early", 4.0, 1, 1)
    later = TraceRequest("later", 5.0, 1, 1)
    path.write_bytes(b"".join(map(row_bytes, [late, early, later])))
    with pytest.raises(InputError, match=r":2: time goes back from 5\.0+ s to 4\.0+ s; sort"):
        list(read_trace(path))
    reader = read_trace(path, skip_bad=True)
    assert [request.id for request in reader] == ["late", "later"]
    assert reader.skipped == 1


def test_no_trace_is_written_that_goes_back_in_time(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    late, early = TraceRequest("late", 5.0, 1, 1), TraceRequest("early", 4.0, 1, 1)
    with pytest.raises(InputError, match=r"time goes back from 5\.0+ s to 4\.0+ s .*'early'"):
        write_trace(path, [late, early])
    assert list(tmp_path.iterdir()) == []
    assert write_trace(path, [early, early, late]) == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "no requests in this trace"), (b"\n \n", "no requests"), (b"{\n", "1 bad rows skipped")],
)
def test_an_empty_trace_is_an_error(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=says):
        list(read_trace(tmp_path / "t.jsonl", skip_bad=True))


def test_a_missing_file_or_a_folder_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(InputError, match="is a directory"):
        read_trace(tmp_path)


def test_reading_stops_where_the_reader_stops(tmp_path: Path) -> None:
    """A dropped reader closes its file: a leak would be a ResourceWarning, an error here."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD + b"\n{broken\n")
    assert next(read_trace(path)).id == "a"
    with read_trace(path) as reader:
        next(reader)


def test_dash_is_standard_input_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    given_input = (DATA / "traces_forebay.jsonl").read_bytes()
    output = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given_input)))
    monkeypatch.setattr(sys, "stdout", output)
    assert write_trace("-", read_trace("-")) == 4
    assert output.buffer.getvalue() == given_input


def test_an_error_half_way_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"precious")

    def broken() -> Iterator[TraceRequest]:
        yield GOLDEN[0]
        raise InputError("elsewhere:7: bad")

    with pytest.raises(InputError, match="elsewhere:7"):
        write_trace(path, broken())
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_bytes(b"")
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    write_trace(tmp_path / "link.jsonl", GOLDEN[:1])
    assert (tmp_path / "link.jsonl").is_symlink()
    assert list(read_trace(tmp_path / "real.jsonl")) == GOLDEN[:1]


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written \(No such file"):
        write_trace(tmp_path / "none" / "t.jsonl", GOLDEN)
