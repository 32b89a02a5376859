"""Each command that reads files meets each file of others that was once misread, with one outcome.

Three readers are behind the commands: of any traffic, of traces, and of results. Each row says what
each of them does: it reads the file, or refuses it with these words.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import forebay

WHEN = "2026-01-05T10:00:0{}Z"
VLLM = {
    "input_lens": [10, 20], "output_lens": [5, 6], "start_times": [0.0, 1.0], "ttfts": [0.1, 0.1],
    "itls": [[0.1] * 4, [0.1] * 5], "errors": ["", ""], "mean_tpot_ms": float("nan"),
    "request_throughput": 1.0,
}  # fmt: skip
AIPERF = {
    "metadata": {"x_request_id": "r", "timestamp_ns": 10**18, "benchmark_phase": "profiling"},
    "metrics": {
        "input_sequence_length": {"value": 70, "unit": "tokens"},
        "output_sequence_length": {"value": 7, "unit": "tokens"},
        "request_latency": {"value": 900.0, "unit": "ms"},
        "time_to_first_token": {"value": 90.0, "unit": "ms"},
    },
}
SPAN = {"name": "chat", "spanId": "b", "startTimeUnixNano": "1700000000000000000",
        "attributes": [{"key": f"gen_ai.response.{side}_tokens", "value": {"intValue": "700"}}
                       for side in ("input", "output")]}  # fmt: skip
CHAT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
SCANNED = '1.2.3.4 - - [05/Jan/2026:10:00:0{} +0000] "{}" 400 157 "-" "-" request_length=4200\n'
LEDGER = {
    "time": WHEN.format(1), "request_id": "r", "tenant": "a", "path": "/v1/chat/completions",
    "bucket": "chat", "status": 200, "prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 2,
    "queue_ms": 0.0, "ttft_ms": 5.0, "duration_ms": 9.0, "backend": "gpu0",
}  # fmt: skip


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


FILES = {
    "nan.json": json.dumps(VLLM),
    "two.json": lines(VLLM, VLLM),
    "bare.json": json.dumps({k: v for k, v in VLLM.items() if k != "request_throughput"}),
    "null.csv": f"timestamp,input_tokens,output_tokens\n{WHEN.format(0)},1200,80\n"
    f"{WHEN.format(1)},NULL,9\n",
    "thousands.csv": f'timestamp,input_tokens,output_tokens\n{WHEN.format(0)},"1,200",80\n',
    "balancer.jsonl": lines(
        {
            "httpRequest": {"requestSize": "4200", "status": 200, "latency": "2.5s"},
            "timestamp": WHEN.format(0),
        }
    ),
    "bedrock.jsonl": lines(
        {
            "timestamp": WHEN.format(0),
            "requestId": "r1",
            "input": {"inputContentType": "application/json", "inputTokenCount": 2716},
            "output": {"outputTokenCount": 120},
        }
    ),
    "mooncake.jsonl": lines(
        *(
            {"timestamp": at, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
            for at in (0, 0.5, 1.0)
        )
    ),
    "scanned.log": SCANNED.format(1, "POST /v1/chat/completions HTTP/1.1")
    + SCANNED.format(2, r"\x16\x03\x01"),
    "haproxy.log": "Feb  6 12:14:14 host haproxy[14389]: 10.0.1.2:33317 "
    "[06/Feb/2026:12:14:14.655] http-in static/srv1 10/0/30/69/109 200 2750 - - ----\n",
    "spans.json": json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}),
    "aiperf.jsonl": lines(AIPERF),
    "items.json": json.dumps([{"id": "1", "items": CHAT}]),
    "wild.jsonl": lines(
        {
            "conversation_hash": "x",
            "timestamp": WHEN.format(0),
            "conversation": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Ho"},
            ],
        }
    ),
    "prompts.jsonl": lines({"request_id": "r1", "prompt": "What is the capital of France?"}),
    "table.txt": "Value(ms)      Percentile    TotalCount    1/(1-Percentile)\n"
    "1.0 0.0 10 1.0\n2.0 1.0 20 inf\n",
    "page.html": "<!DOCTYPE html>\n<html><body>404</body></html>\n",
    "cut.jsonl": lines(LEDGER, LEDGER)[:-20],
}


READ = ""
NO_TRACE = "makes a trace of a table"
KEYS = "unknown key "
NO_RESULT = "has no results; `forebay replay` or `simulate` it"
NO_RUN = "give a run folder, or a result of `vllm bench serve`"
HTML = "an HTML page; download the file again"
LENGTHS = "a log of HAProxy, which holds no lengths of prompts; log JSON with nginx's names"
CHOOSE = "FILE#1, FILE#2 and so on choose one"
OUTCOMES = {
    # file: import, then describe and simulate, then report, compare and merge
    "nan.json": (READ, READ, READ),
    "two.json": (CHOOSE, CHOOSE, READ),
    "two.json#2": (READ, READ, READ),
    "bare.json": (READ, READ, READ),
    "null.csv": ("null.csv:3: no number of input tokens", NO_TRACE, f"a table; {NO_RUN}"),
    "thousands.csv": (READ, NO_TRACE, f"a table; {NO_RUN}"),
    "balancer.jsonl": ("no prompt length; add input=COLUMN", KEYS, NO_RUN),
    "bedrock.jsonl": (READ, KEYS, NO_RUN),
    "mooncake.jsonl": (READ, READ, NO_RESULT),
    "scanned.log": (READ, READ, NO_RESULT),
    "haproxy.log": (LENGTHS, LENGTHS, LENGTHS),
    "spans.json": (READ, READ, NO_RESULT),
    "aiperf.jsonl": (READ, READ, READ),
    "items.json": (READ, READ, NO_RESULT),
    "wild.jsonl": (READ, READ, NO_RESULT),
    "prompts.jsonl": ("prompts without times: traces import prompts", "import prompts", NO_RUN),
    "table.txt": ("a percentile distribution is no", "a percentile distribution is no", READ),
    "page.html": (HTML, HTML, HTML),
    "cut.jsonl": ("cut.jsonl:2: not JSON (unexpected end of data", KEYS, READ),
}
MERGED = {"table.txt": "latency targets differs from table.txt"}  # it has none


@pytest.mark.parametrize("name", OUTCOMES)
def test_each_reader_has_one_outcome(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = name.partition("#")[0]
    Path(file).write_text(FILES[file])
    Path("other.json").write_text(json.dumps(VLLM | {"ttfts": [0.2, 0.3]}))
    wanted = OUTCOMES[name]
    for words, told in (
        (f"traces import auto {name} -o out.jsonl --tokens estimate", wanted[0]),
        (f"traces describe {name}", wanted[1]),
        (f"simulate {name} --gpus 1 --json", wanted[1]),
        (f"report {name} -o out.html", wanted[2]),
        (f"compare {name} other.json", wanted[2]),
        (f"runs merge {name} other.json --out merged", MERGED.get(name, wanted[2])),
    ):
        done = forebay(*words.split())
        said, status = done.stderr, 2 if told else 0
        assert (done.returncode, "Traceback" in said) == (status, False), (words, said)
        assert told in said, words
        if told:
            assert said.splitlines()[-1].startswith("forebay "), words
            assert len(said.splitlines()) <= 2, words
