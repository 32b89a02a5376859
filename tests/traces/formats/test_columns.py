"""Tables of services that nobody has seen: the guess finds their columns, `--map` corrects it."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from commands import forebay, printed, remarks

from forebay.traces.formats import ReadOptions, detect
from forebay.traces.formats.columns import map_text, mapped_format, parse_map
from forebay.traces.formats.guess import guess
from forebay.traces.ground.errors import InputError
from forebay.traces.reading.jsonl import read_trace

LOREM = "Tell me about the river and its mill, please."


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue().to_pybytes())


# name, file, the mapping that is right, arrivals, input and output tokens of the trace
SERVICES = [
    (
        "gateway with nested usage",
        lines(
            *(
                {"ts": f"2026-11-24T08:00:0{n}.500Z", "req": {"uuid": f"u{n}", "tenant_id": "acme",
                 "model": "llama-8b"}, "usage": {"prompt_tokens": 100 + n, "cached_tokens": 9,
                 "completion_tokens": 20}, "http": {"status": 200}, "ttft_ms": 31.5}
                for n in range(3)
            )
        ),
        "arrival=ts:iso8601,input=usage.prompt_tokens,output=usage.completion_tokens,id=req.uuid,"
        "tenant=req.tenant_id,model=req.model,status=http.status",
        [0.0, 1.0, 2.0], [100, 101, 102], [20, 20, 20],
    ),
    (
        "European CSV: BOM, semicolons, decimal commas, epoch seconds",
        b"\xef\xbb\xbfUhrzeit;Start Time;Tokens In;Tokens Out;Kunde\n"
        b"x;1764000000,250;500;60;a\ny;1764000001,500;700;5;b\n",
        "arrival=Start Time:s,input=Tokens In,output=Tokens Out",
        [0.0, 1.25], [500, 700], [60, 5],
    ),
    (
        "end time and latency in ms, epoch ms, total tokens",
        lines(
            {"finished_at": 1764000002500, "latency_ms": 2500, "inputTokenCount": 80,
             "totalTokenCount": 100, "conversationId": "c1"},
            {"finished_at": 1764000003000, "latency_ms": 500, "inputTokenCount": 40,
             "totalTokenCount": 41, "conversationId": "c2"},
        ),
        "end=finished_at:ms,duration=latency_ms:ms,input=inputTokenCount,total=totalTokenCount,"
        "session=conversationId",
        [0.0, 2.5], [80, 40], [20, 1],
    ),
    (
        "tab separated, relative seconds",
        b"arrival_time\tn_prompt\tn_generated\tuser\n0.0\t1024\t128\tu1\n0.75\t64\t32\tu2\n",
        "arrival=arrival_time:s,input=n_prompt,output=n_generated,tenant=user",
        [0.0, 0.75], [1024, 64], [128, 32],
    ),
    (
        "a prompt and its answer's length, microseconds",
        lines(
            {"created_us": 1764000000000000, "prompt": LOREM, "response_tokens": 9, "stream": True},
            {"created_us": 1764000000250000, "prompt": "Hi", "response_tokens": 2, "stream": False},
        ),
        "arrival=created_us:us,output=response_tokens,text=prompt,stream=stream",
        [0.0, 0.25], [12, 1], [9, 2],
    ),
    (
        "Parquet with chat messages",
        parquet(
            [
                {"event_time": "2026-11-24 08:00:00", "chat": json.dumps([{"role": "user",
                 "content": LOREM}]), "reply_tokens": 40, "thread_id": "t1"},
                {"event_time": "2026-11-24 08:00:05", "chat": json.dumps([{"role": "user",
                 "content": "Hi"}]), "reply_tokens": 4, "thread_id": "t1"},
            ]
        ),
        "arrival=event_time:iso8601,output=reply_tokens,messages=chat,session=thread_id",
        [0.0, 5.0], [13, 3], [40, 4],
    ),
    (
        "nanoseconds as text, sizes named len",
        b"start_ns,prompt_len,output_len,request_id,http_status\n"
        b"1764000000000000000,300,30,r1,200\n1764000000100000000,400,0,r2,503\n",
        "arrival=start_ns:ns,input=prompt_len,output=output_len,id=request_id,status=http_status",
        [0.0, 0.1], [300, 400], [30, 0],
    ),
    (
        "a JSON array with words run together, and other times beside the arrival",
        json.dumps(
            [
                {"first_token_time": 5.2, "request_time": 5.0, "ntokensin": 70, "ntokensout": 7,
                 "queue_time": 0.1, "team": "blue"},
                {"first_token_time": 6.9, "request_time": 6.5, "ntokensin": 90, "ntokensout": 9,
                 "queue_time": 0.2, "team": "red"},
            ]
        ).encode(),
        "arrival=request_time:s,input=ntokensin,output=ntokensout,tenant=team",
        [0.0, 1.5], [70, 90], [7, 9],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "mapping", "arrivals", "inputs", "outputs"),
    [service[1:] for service in SERVICES],
    ids=[service[0] for service in SERVICES],
)
def test_the_columns_of_an_unknown_service_are_guessed_right(
    content: bytes,
    mapping: str,
    arrivals: list[float],
    inputs: list[int],
    outputs: list[int],
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    assert detect(path) is None
    found = guess(path)
    assert map_text(found) == mapping
    rows = list(mapped_format(found).open(path, ReadOptions(tokens="estimate")))
    assert [row.arrival_s for row in rows] == pytest.approx(arrivals, abs=2e-6)
    assert [row.input_tokens for row in rows] == inputs
    assert [row.output_tokens for row in rows] == outputs


def test_a_dry_run_shows_the_guess_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(SERVICES[0][1])
    out = tmp_path / "t.jsonl"
    words = ("traces", "import", "auto", path, "-o", out)
    done = forebay(*words, "--dry-run")
    assert done.returncode == 0
    assert "input=usage.prompt_tokens" in done.stderr
    assert '"input_tokens":100' in done.stdout
    assert not out.exists()
    assert "guessed:  --map arrival=ts:iso8601" in remarks(*words)
    assert [one.id for one in read_trace(out)] == ["u0", "u1", "u2"]
    mapping = "arrival=ts,input=usage.prompt_tokens,output==7,tenant==all"
    printed(*words, "--map", mapping, "--force")
    assert {(one.output_tokens, one.tenant) for one in read_trace(out)} == {(7, "all")}


def test_turns_of_a_mapped_session_follow_the_answers_that_had_ended(tmp_path: Path) -> None:
    """The second request begins while the first still runs, so only the third waits for it."""
    path = tmp_path / "log.csv"
    path.write_bytes(b"ts,took,in,out,conv\n1,4.0,10,5,a\n2,1.0,10,5,a\n9,1.0,10,5,a\n")
    found = parse_map("arrival=ts:s,duration=took:s,input=in,output=out,session=conv")
    rows = list(mapped_format(found).open(path))
    assert [row.parent for row in rows] == [None, None, "row-2"]
    assert [row.think_s for row in rows] == [None, None, 4.0]


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ("arival=ts,input=n", "'arival=ts' is not TARGET=COLUMN"),
        ("arrival=ts", "no prompt length"),
        ("input=n", "no time"),
        ("arrival=ts:hours,input=n", "unit 'hours' of arrival is not known; one of: s, ms"),
        ("arrival=ts,input==many", "input==many is not a whole number"),
        ("arrival=ts,input=n,class=who", "who: 'a' is not interactive, standard or batch"),
        ("arrival=ts,input=absent", "no number of input tokens and no prompt"),
    ],
)
def test_a_wrong_mapping_is_one_line(mapping: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"ts,n,who,out\n1,2,a,3\n")
    with pytest.raises(InputError, match=says) as error:
        list(mapped_format(parse_map(mapping)).open(path))
    assert "\n" not in str(error.value)


def test_a_table_without_a_time_lists_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"prompt_tokens,colour\n5,red\n6,blue\n")
    with pytest.raises(InputError, match=r"no time; add .* the columns are prompt_tokens, colour"):
        guess(path)
