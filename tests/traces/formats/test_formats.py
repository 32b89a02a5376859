"""Importers of published traces: Mooncake, Azure, and the formats that `open_trace` recognises."""

import csv
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from paths import DATA, SHARED

from forebay.traces.formats import ReadOptions, detect, open_trace, trace_format
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace
from forebay.traces.reading.reader import TraceReader
from forebay.traces.synth.ticks import spread_ticks

TRACES = SHARED / "data" / "traces"
needs_data = pytest.mark.skipif(not TRACES.is_dir(), reason="no ../shared/data")


def read_azure(path: Path, *, skip_bad: bool = False) -> TraceReader:
    return open_trace(path, format_name="azure", skip_bad=skip_bad)


def read_mooncake(path: Path, *, skip_bad: bool = False) -> TraceReader:
    return open_trace(path, format_name="mooncake", skip_bad=skip_bad)


HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = b"2023-11-16 18:17:03.9799600,4808,10\n"
MOONCAKE = b'{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]}\n'


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("traces_mooncake.jsonl", "mooncake"),
        ("traces_azure_2023.csv", "azure"),  # CRLF, seven digits, no newline at the end
        ("traces_azure_2024.csv", "azure"),  # offsets, and a second without a fraction
    ],
)
def test_golden_import(source: str, name: str, tmp_path: Path) -> None:
    golden = DATA / f"{source.rpartition('.')[0]}.imported.jsonl"
    write_trace(tmp_path / "t.jsonl", open_trace(DATA / source, format_name=name))
    assert (tmp_path / "t.jsonl").read_bytes() == golden.read_bytes()
    assert list(open_trace(DATA / source)) == list(open_trace(golden))


@pytest.mark.parametrize(
    ("read", "head", "row", "good", "says"),
    [
        (read_azure, HEADER, b"2023-11-16 18:17:03.9,1\n", ROW, "2 fields, the header has 3 ("),
        (read_azure, HEADER, b"yesterday,1,2\n", ROW, "TIMESTAMP: 'yesterday' is not a time"),
        (read_azure, HEADER, b"2023-11-16 18:17:03.9,x,2\n", ROW, "ContextTokens: 'x' is not"),
        (read_azure, HEADER, b"2023-11-16 18:17:03.9,0,2\n", ROW, "ContextTokens: '0' is not"),
        (read_azure, HEADER, b"2023-11-16 18:17:03.9,1,-2\n", ROW, "GeneratedTokens: '-2'"),
        (read_azure, HEADER, b"\xff\xfe,1,2\n", ROW, "TIMESTAMP"),
        (read_azure, HEADER + ROW, b"2023-11-16 18:17:02.0,1,2\n", ROW, "time goes back"),
        (read_mooncake, b"", b"{}\n", MOONCAKE, "timestamp: no such column in this row"),
        (read_mooncake, b"", b'{"delay": 5}\n', MOONCAKE, "import this file as mooncake-sessions"),
        (
            read_mooncake,
            b"",
            MOONCAKE.replace(b"9", b"513"),
            MOONCAKE,
            "hash_ids: 1 ids for 513 tokens; blocks of 512 tokens make 2",
        ),
        (read_mooncake, b"", MOONCAKE.replace(b"[0]", b"[0.5]"), MOONCAKE, "is not a block id"),
        (read_mooncake, b"", MOONCAKE.replace(b" 9", b" 0"), MOONCAKE, "input_length: 0"),
    ],
)
def test_a_bad_row_names_file_and_line_and_can_be_skipped(
    read: Callable[..., TraceReader],
    head: bytes,
    row: bytes,
    good: bytes,
    says: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "raw"
    path.write_bytes(head + row + good)
    with pytest.raises(InputError) as error:
        list(read(path))
    line = len(head.splitlines()) + 1
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert says in str(error.value)
    other = not head and b"input_length" not in row  # the first row has no column of the format
    assert ("does not look like" in str(error.value)) is other
    reader = read(path, skip_bad=True)
    requests = list(reader)
    assert reader.skipped == 1
    assert requests[0].arrival_s == 0.0  # a bad first row does not set the start


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (HEADER + ROW, "azure"),
        (MOONCAKE, "mooncake"),
        (b'{"id":"timestamp","arrival_s":0,"input_tokens":9,"output_tokens":1}', "forebay"),
        (b"", None),
        (b"rubbish", None),
    ],
)
def test_formats_are_told_apart_by_their_first_bytes(
    content: bytes, name: str | None, tmp_path: Path
) -> None:
    (tmp_path / "t").write_bytes(content)
    assert detect(tmp_path / "t") == name


def test_an_unknown_format_names_those_there_are() -> None:
    with pytest.raises(InputError, match="no trace format 'csv'; one of: azure, burstgpt"):
        trace_format("csv")


@needs_data
@pytest.mark.parametrize("name", ["code", "conv_head"])
def test_azure_files_import_without_loss(name: str) -> None:
    path = TRACES / f"AzureLLMInferenceTrace_{name}.csv"
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    requests = list(read_azure(path))
    assert len(requests) == len(rows)
    assert [request.input_tokens for request in requests] == [
        int(row["ContextTokens"]) for row in rows
    ]
    assert [request.output_tokens for request in requests] == [
        int(row["GeneratedTokens"]) for row in rows
    ]
    # Times by hand, in units of 100 ns of the day: nothing is lost but a digit that is always 0.
    ticks = [_ticks(row["TIMESTAMP"]) for row in rows]
    assert all(tick % 10 == 0 for tick in ticks)
    assert [round(request.arrival_s * 10**7) for request in requests] == [
        tick - ticks[0] for tick in ticks
    ]


def _ticks(timestamp: str) -> int:
    hours, minutes, rest = timestamp.split(" ")[1].split(":")
    whole, fraction = rest.split(".")
    return ((int(hours) * 60 + int(minutes)) * 60 + int(whole)) * 10**7 + int(fraction)


@needs_data
@pytest.mark.parametrize(("name", "count"), [("synthetic", 1_920), ("conversation", 5_719)])
def test_mooncake_files_import_without_loss(name: str, count: int) -> None:
    path = TRACES / f"mooncake_{name}_head.jsonl"
    requests = list(read_mooncake(path))
    assert len(requests) == count
    with open(path) as file:
        for request, line in zip(requests, file, strict=True):
            row = json.loads(line)
            assert request.arrival_s == row["timestamp"] / 1000
            assert request.input_tokens == row["input_length"]
            assert request.output_tokens == row["output_length"]
            assert list(request.blocks or ()) == row["hash_ids"]


BURSTGPT = {
    "1": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n",
    "3": b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
    b"Log Type\n19440110.0,6f1c,4.0,ChatGPT,472,18,490,Conversation log\n"
    b"19440150.0,,,ChatGPT,1087,0,1087,API log\n",
}


@pytest.mark.parametrize("version", BURSTGPT)
def test_burstgpt_with_and_without_sessions(version: str, tmp_path: Path) -> None:
    """Version 3 has times as decimals, and no session for calls of the API."""
    path = tmp_path / "BurstGPT.csv"
    path.write_bytes(BURSTGPT[version])
    assert detect(path) == "burstgpt"
    first, second = open_trace(path)
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 472, 18)
    assert (second.arrival_s, second.output_tokens, second.status) == (40.0, 0, 500)
    assert (first.session, second.session) == ("6f1c" if version == "3" else None, None)


# Format, requests and, where ../shared/facts_traces.md has it, the mean rate. ServeGen's requests
# are made: their rate is the sum of the clients' in the first window.
WHOLE = {
    "AzureLLMInferenceTrace_code.csv": ("azure", 8_819, 2.57),
    "AzureLLMInferenceTrace_conv_head.csv": ("azure", 9_683, None),
    "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv": ("vidur", 28_257, None),
    "mooncake_conversation_head.jsonl": ("mooncake", 5_719, None),
    "mooncake_synthetic_head.jsonl": ("mooncake", 1_920, None),
    "kv_cache_tester": ("kv-cache-tester", 407, None),  # 395, and 12 inside two sub-agents
    "servegen/reason/deepseek-r1": ("servegen", None, None),
}


@needs_data
@pytest.mark.parametrize("name", WHOLE)
def test_public_files_are_recognised_and_import_whole(name: str) -> None:
    kind, count, rate = WHOLE[name]
    path = TRACES / name
    assert detect(path) == kind
    requests = list(open_trace(path))
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    if count is not None:
        assert len(requests) == count
    if kind == "servegen":
        clients = [file.read_text().partition("\n")[0] for file in path.glob("chunk-*-trace.csv")]
        wanted = sum(float(line.split(",")[1]) for line in clients)
        assert len(requests) / 600 == pytest.approx(wanted, rel=0.1)
    if rate is not None:
        assert (len(requests) - 1) / arrivals[-1] == pytest.approx(rate, rel=2e-3)


@needs_data
def test_ticks_spread_to_nearly_poisson_arrivals() -> None:
    path = TRACES / "mooncake_conversation_head.jsonl"
    ticked = list(read_mooncake(path))
    spread = list(spread_ticks(ticked, seed=0))
    assert _variation([one.arrival_s for one in ticked]) > 2.5
    assert _variation([one.arrival_s for one in spread]) == pytest.approx(1.0, abs=0.05)
    assert [one.id for one in spread] == [one.id for one in ticked]  # so sharing is unchanged
    for before, after in zip(ticked, spread, strict=True):
        assert before.arrival_s <= after.arrival_s <= before.arrival_s + 3
    assert all(one.arrival_s <= two.arrival_s for one, two in pairwise(spread))
    assert spread == list(spread_ticks(ticked, seed=0))
    assert spread != list(spread_ticks(ticked, seed=1))


def _at(*times_s: float) -> list[TraceRequest]:
    return [TraceRequest(f"r{at}", time_s, 1, 1) for at, time_s in enumerate(times_s)]


def test_a_trace_without_ticks_is_not_spread() -> None:
    """A spread of such a trace would have times that go back, which no reader accepts."""
    with pytest.raises(
        InputError, match=r"--spread: this trace has no 3 s ticks \(r3 comes 0\.04 s"
    ):
        list(spread_ticks(_at(0.0, 3.0, 3.0, 3.04), seed=0))


@pytest.mark.parametrize("seed", range(20))
def test_a_tick_that_is_early_is_not_overtaken(seed: int) -> None:
    """130 of the first 600 gaps of the conversation trace are 2.999 s."""
    ticked = _at(*[0.0] * 5000, *[2.999] * 10)
    spread = [request.arrival_s for request in spread_ticks(ticked, seed=seed)]
    assert spread == sorted(spread)
    assert spread[4999] > 2.99
    assert all(2.999 <= one <= 5.999 for one in spread[5000:])


def _variation(times: list[float]) -> float:
    gaps = [two - one for one, two in pairwise(times)]
    return pstdev(gaps) / fmean(gaps)


SMALL_BLOCKS = (
    b'{"timestamp": 0, "input_length": 48, "output_length": 1, "hash_ids": [1, 2, 3]%s}\n'
)
NO_BLOCKS = b'{"timestamp": 9, "input_length": 48, "output_length": 1}\n'


@pytest.mark.parametrize("more", [b"", b', "session_id": "s"'])
def test_blocks_of_another_size_need_an_option_that_the_error_names(
    more: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(SMALL_BLOCKS % more)
    if not more:
        with pytest.raises(InputError, match="if they have another size, add --block-tokens 16"):
            list(open_trace(path))
    (found,) = open_trace(path, options=ReadOptions(block_tokens=16))
    assert (found.blocks, found.block_tokens) == ((1, 2, 3), 16)
    with pytest.raises(InputError, match=r"blocks of 7 tokens make 7; if they have another size"):
        list(open_trace(path, options=ReadOptions(block_tokens=7)))


def test_an_import_says_that_a_file_has_no_times(tmp_path: Path) -> None:
    """A rate of exactly one request a second looked like a measurement."""
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n10,2\n20,3\n")
    reader = open_trace(path)
    assert [request.arrival_s for request in reader] == [0.0, 1.0]
    (note,) = reader.notes
    assert note.startswith("requests without a time, which arrive a second apart")
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,2\n")
    timed = open_trace(path)
    assert [request.arrival_s for request in timed] == [0.5]
    assert not timed.notes


@pytest.mark.parametrize("empty", [b"", b', "hash_ids": []', b', "hash_ids": null'])
def test_rows_without_hash_ids_have_lengths_only(empty: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(MOONCAKE + NO_BLOCKS.replace(b"}", empty + b"}"))
    reader = open_trace(path)
    first, second = reader
    assert (first.blocks, second.blocks, second.input_tokens) == ((0,), None, 48)
    assert reader.notes == {"rows without hash_ids, whose prompts share nothing": 1}
