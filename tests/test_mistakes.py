"""A mistake gets one line that says what is wrong and what would be right, and exit status 2."""

import json
import shlex
from pathlib import Path

import pytest

from forebay.proxy.cli import main

BACKEND = "--backend http://127.0.0.1:1"
TO = "--target http://127.0.0.1:1 --out run"
MODEL = "--model llama-3-8b"
FILES = {
    "good.jsonl": json.dumps({"id": "a", "arrival_s": 0, "input_tokens": 5, "output_tokens": 5}),
    "empty.jsonl": "",
    "back.jsonl": '{"id":"a","arrival_s":2,"input_tokens":5,"output_tokens":5}\n'
    '{"id":"b","arrival_s":1,"input_tokens":5,"output_tokens":5}',
    "text.txt": "hello",
    "unknown.yaml": "backendz: []",
    "bukets.yaml": "bukets: []",
    "two.yaml": "buckets: [{name: a, up_to: lots}, {name: b, up_to: 5, max_wait: soon}]",
    "list.yaml": "- a",
    "tuple.yaml": "backends: http://127.0.0.1:1",
    "broken.yaml": "listen: {port: 1\nx: [",
    "events.yaml": "backends: [{url: 'http://127.0.0.1:1', kv_events: 'tcp://127.0.0.1'}]",
    "policy.yaml": "routing: fastest\nbackends: [{url: 'http://127.0.0.1:1'}]",
    "config.json": "{}",
    "address.yaml": "listen: 0.0.0.0:9000",
    "deep.yaml": "[" * 2000,
    "twice.yaml": "hold: {max_requests: 1}\nhold: {max_requests: 2}",
    "ledger.yaml": "backends: [{url: 'http://h:1'}]\nusage: {path: /nowhere/u.jsonl}",
    "capture.yaml": "backends: [{url: 'http://h:1'}]\ncapture: {path: c.jsonl}",
    "blocks.jsonl": ",".join("7" * 400_000),
}
MISTAKES = [
    ("--install-completion", "no command"),
    ("prox", "did you mean proxy?"),
    ("proxy --prot 1", "--port"),
    ("proxy --port x", "'--port': give a whole number"),
    (f"proxy {BACKEND} --port 70000", "listen.port: 70000: give 65535 or less"),
    ("proxy --backend 127.0.0.1:8001", "give a URL such as http://127.0.0.1:8001"),
    ("proxy", "no backend: give --backend"),
    ("proxy extra", "unexpected extra argument"),
    ("proxy --config nowhere.yaml", "nowhere.yaml: No such file"),
    ("proxy --config unknown.yaml", "backendz: unknown key; did you mean backends?"),
    ("proxy --config bukets.yaml", "bukets: unknown key; did you mean buckets?"),
    ("proxy --config two.yaml", "buckets.0.up_to: 'lots': give a whole number; buckets.1.max_wait"),
    ("proxy --config list.yaml", "give keys and values"),
    ("proxy --config tuple.yaml", "backends: 'http://127.0.0.1:1': give a list"),
    ("proxy --config broken.yaml", "broken.yaml:2: "),
    ("proxy --config address.yaml --check-config", "address.yaml: listen: give keys and values"),
    ("proxy --config deep.yaml --check-config", "deep.yaml: nested too deeply"),
    ("proxy --config twice.yaml --check-config", "twice.yaml:2: the key 'hold' is given twice"),
    ("proxy --config ledger.yaml --check-config", "usage.path: there is no folder /nowhere"),
    ("proxy --config capture.yaml --check-config", "capture.path: set FOREBAY_CAPTURE_SALT to"),
    ("proxy --config events.yaml --check-config", "give a ZeroMQ endpoint"),
    ("proxy --config policy.yaml", "fastest"),
    (f"proxy {BACKEND} --workers 0", "'--workers': give 1 or more"),
    ("explain", "give one of REQUEST_ID, --slowest N, --rejected, --dry-run"),
    ("explain ID --rejected", "give one of REQUEST_ID, --slowest N"),
    ("explain ID --since 10m", "--bucket and --since need --slowest N or --rejected"),
    ("explain ID --tenant x", "--tenant needs --dry-run"),
    ("explain --slowest 0", "'--slowest': give 1 or more"),
    ("explain --slowest 5 --since soon", "give a time such as 90, 3m or 500ms"),
    ("explain --rejected --admin http://127.0.0.1:1", "is it the admin port of a running proxy?"),
    ("explain --dry-run nowhere.json", "--dry-run nowhere.json: No such file"),
    ("explain ID --admin http://127.0.0.1:1", "is it the admin port of a running proxy?"),
    ("explain ID --admin nowhere", "give a URL"),
    ("explain ID --admin http://[::1", "--admin http://[::1: give a URL"),
    ("explain ID --admin http://127.0.0.1:1/a%20b", "no answer"),
    ("doctor --admin http://127.0.0.1:1", "is it the admin port of a running proxy?"),
    ("doctor --admin nowhere", "give a URL such as http://127.0.0.1:9090"),
    ("doctor --config nowhere.yaml", "'--config': "),
    ("doctor extra", "unexpected extra argument"),
    ("top --admin http://127.0.0.1:1", "is it the admin port of a running proxy?"),
    ("top --once --admin nowhere", "give a URL such as http://127.0.0.1:9090"),
    ("engine", "--model llama-3-8b"),
    ("engine --model gpt-5", "no such model; the simulated ones are DeepSeek-V3.2"),
    (f"engine {MODEL} --gpu abacus", "no such GPU; the simulated ones are"),
    (f"engine {MODEL} --port 99999", "'--port': give 65535 or less"),
    (f"engine {MODEL} --fault nonsense", "NAME one of unhealthy"),
    (f"engine {MODEL} --time-scale 0", "more than 0"),
    (f"engine {MODEL} --kv-events-config x", "not JSON"),
    (f"engine {MODEL} --vllm-version 9", "give 0.11"),
    (f"engine {MODEL} -dp 0", "--data-parallel-size 0: give 1 to 64"),
    (f"engine {MODEL} --data-parallel-size 12345", "--data-parallel-size 12345: give 1 to 64"),
    (f"engine {MODEL} -dp 4 --api-server-count 2", "a process for each rank; leave it out"),
    (f"engine {MODEL} --max-num-seqs 0", "1 or more"),
    (f"engine fit nowhere.csv {MODEL} --gpu h200", "nowhere.csv: cannot be read"),
    ("engine fit", "Missing"),
    ("replay", "Missing argument 'trace'"),
    ("replay good.jsonl", "Missing option '--target'"),
    ("replay good.jsonl --target nowhere --out run", "write e.g. http://127.0.0.1:8080"),
    (f"replay good.jsonl {TO}", "cannot be reached"),
    (f"replay nowhere.jsonl {TO}", "nowhere.jsonl: no such file"),
    (f"replay text.txt {TO}", "text.txt:1: not JSON"),
    (f"replay empty.jsonl {TO}", "empty"),
    (f"replay back.jsonl {TO}", "back.jsonl:2"),
    (f"replay good.jsonl {TO} --duration soon", "give a time such as 90, 3m or 500ms"),
    (f"replay good.jsonl {TO} --rate -1", "--rate: -1 is not a number above 0"),
    (f"replay good.jsonl {TO} --rate fast", "'--rate': give a number"),
    (f"replay good.jsonl {TO} --slo chat", "e.g. chat.ttft=2s"),
    (f"replay good.jsonl {TO} --slo video.ttft=1s", "--slo: no bucket 'video'"),
    (f"replay good.jsonl {TO} --slo chat.ttft_p95=2s", "one of: ttft, e2e, tpot, stall"),
    (f"replay good.jsonl {TO} --arrivals weekly", "none of trace, constant, poisson"),
    (f"replay good.jsonl {TO} --buckets chat", "write e.g. chat:5000,document:131072"),
    ("simulate", "Missing argument 'trace'"),
    ("simulate nowhere.jsonl", "no such file; check the path"),
    ("simulate good.jsonl --gpus two", "'--gpus': give a whole number"),
    ("simulate good.jsonl --sweep seed=0,1", "nothing is random in --arrivals trace"),
    ("simulate good.jsonl --explain nobody", "no such request"),
    ("simulate good.jsonl --config unknown.yaml", "did you mean backends?"),
    ("simulate good.jsonl --jobs 0", "'--jobs': give 1 or more"),
    ("simulate good.jsonl --duration 3days", "give a time such as 90, 3m or 500ms"),
    ("traces", "Missing command"),
    ("traces descripe x", "No such command 'descripe'"),
    ("traces describe nowhere.jsonl", "no such file; check the path"),
    ("traces describe text.txt", "text.txt:1: not JSON"),
    ("traces fetch nothing", "one of: mooncake-conversation"),
    ("traces import nothing text.txt -o x.jsonl", "one of: azure, burstgpt"),
    ("traces synth documents --users 0 -o x.jsonl", "--users 0: give 1 or more"),
    ("traces synth documents --duration 0 -o x.jsonl", "give more than 0 seconds"),
    ("traces synth documents --rate -2 -o x.jsonl", "more than 0 requests a second"),
    *(
        (f"traces {words}", says)
        for words, says in (
            ("describe /", "/: is a directory"),
            ("synth documents -o y --document-tokens big", "--document-tokens: 'big'"),
            ("synth documents -o y --rate 1e-9", "no request arrives in it"),
            ("synth chat-beside-documents -o y --questions 0", "--questions 0"),
            ("synth agent-sessions -o y --context-tokens 9", "--context-tokens 9"),
            ("synth shared-document -o y --document-tokens 0", "--document-tokens 0"),
            ("synth shared-document -o y --output-tokens -1", "--output-tokens -1"),
            ("synth documents -o - --json", "--json: standard output has the rows already"),
            ("import azure good.jsonl --json", "--json: standard output has the rows already"),
            ("needle -o - --answers y --json", "--json: standard output has the"),
            ("zeroscrolls none -o - --json", "--json: standard output has the rows"),
            ("synth spaghetti", "No such command 'spaghetti'"),
            ("import azure none -o y", "none: no such file"),
            ("zeroscrolls none -o y", "none: no such file"),
            ("zeroscrolls none -o y --context 0", "--context 0"),
            ("needle -o -", "--answers: a trace on standard output"),
            ("needle -o y --lengths 8k", "--lengths: '8k' is not numbers"),
        )
    ),
    ("report", "Missing argument"),
    ("report nowhere", "give a run folder"),
    ("report good.jsonl", "a trace or a capture has no results"),
    ("runs merge", "Missing argument"),
    ("runs merge a b", "Missing option '--out'"),
    ("runs merge a b --out m", "give a run folder"),
    ("runs merge good.jsonl good.jsonl --out m", "a trace or a capture has no results"),
    ("compare good.jsonl", "give two or more runs"),
    ("compare", "Missing argument"),
    ("compare a b", "give a run folder"),
    ("size", "Missing option '--users'"),
    ("size --users 5", "Missing option '--document-tokens'"),
    ("size --users some --document-tokens 1000", "'--users': give a whole number"),
    ("kv", "--model: give a name such as llama-3-8b"),
    ("kv --model config.json --gpu h200", "num_attention_heads is missing"),
    ("kv --model gpt-5 --gpu h200", "config.json"),
    ("kv --model nowhere/config.json --gpu h200", "no such file"),
    *(
        (f"kv {MODEL} {words}", says)
        for words, says in (
            ("--gpu abacus", "or give --gpu-memory-gib"),
            ("", "--gpu"),
            ("--gpu-memory-gib -1", "--gpu-memory-gib"),
            ("--gpu h200 --length 8k", "give tokens, such as 8192,32768,131072"),
            ("--gpu h200 --length ²", "--lengths ²"),
            ("--gpu h200 --tp 3", "--tp 3"),
            ("--gpu h200 --kv-cache-dtype int3", "--kv-cache-dtype int3"),
            ("--gpu h200 --gpu-memory-utilization 1.1", "--gpu-memory-utilization"),
            ("--gpu h200 --max-model-len 131073", "takes at most 131,072 tokens"),
            ("--gpu h200 --weights-gib 0", "--weights-gib"),
            ("--gpu h200 --gpu-memory-gib inf", "--gpu-memory-gib inf"),
            ("--gpu h200 --cuda-graph-gib nan", "--cuda-graph-gib nan"),
        )
    ),
    ("kv verify nowhere.log", "nowhere.log"),
    ("kv verify blocks.jsonl", "no line with the size of the KV cache"),
    ("search nowhere.jsonl --target sim:llama-3-8b@h200 --slo ttft=2s", "no such file"),
    ("search good.jsonl --target sim:llama-3-8b@h200 --slo soon", "e.g. chat.ttft=2s"),
    ("traces export nothing good.jsonl", "one of: mooncake, aiperf"),
    ("traces synth documents -o none/x.jsonl --duration 10s", "no such folder; make /"),
    (f"engine {MODEL} --host nowhere.invalid", "cannot listen: Name or service not known"),
    (f"engine {MODEL} --calibration text.txt", "text.txt: not JSON"),
    ("proxy --config .", "Is a directory"),
    ("experiment kv --target sim:llama-3-8b@abacus --out x", "no such GPU"),
    ("completion csh", "one of: bash, zsh, fish"),
    ("experiment", "Missing command"),
    ("experiment nothing", "No such command 'nothing'"),
    ("experiment prefill", "Missing option '--target'"),
    ("experiment prefill --target llama-3-8b --out x", "or sim:MODEL@GPU"),
    ("experiment prefill --target sim:gpt@h200 --out x", "no such model"),
    ("fleet up", "Missing option '--model'"),
    ("fleet up --model x/y --dry-run --gpus all", "--gpus all: give GPU numbers"),
    ("fleet status --dir nowhere", "no such folder; `forebay fleet up` makes it"),
    ("demo --duration 0", "--duration 0: give more than 0 seconds"),
    *(
        (f"demo --out y --time-scale {n}", "--time-scale")
        for n in ("fast", "0", "-1", "nan", "inf")
    ),
    ("demo --out y --gpu abacus", "abacus"),
    ("demo --out good.jsonl --duration 5", "--out: good.jsonl cannot be made"),
    ("demo --out good.jsonl/x --duration 5 --force", "--out: good.jsonl/x cannot be made"),
    ("demo --duration soon", "give a time such as 90, 3m or 500ms"),
    ("demo --model gpt --out y", "no such model"),
    ("completion", "Missing argument 'shell'"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_gets_one_line(
    line: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)) == 2
    out, err = capfd.readouterr()
    assert words in err
    assert err.startswith("forebay")
    assert err.count("\n") == 1
    assert not out
    for leak in ("Traceback", "Input should be", "unable to parse", "pydantic", "Errno"):
        assert leak not in err
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)


def test_the_check_of_a_configuration_finds_what_the_start_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The extra of KV events is not installed."""
    config = tmp_path / "f.yaml"
    endpoint = "tcp://127.0.0.1:5557"
    config.write_text(f"backends: [{{url: 'http://127.0.0.1:1', kv_events: '{endpoint}'}}]\n")
    monkeypatch.setitem(__import__("sys").modules, "msgspec", None)
    assert main(["proxy", "--config", str(config), "--check-config"]) == 2
    assert "kv_events needs msgspec, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "simulate good.jsonl --sweep gpus=1,2 --jobs 2",
        "size --users 5 --document-tokens 9000 --quick --jobs 2",
    ],
)
def test_a_machine_without_shared_memory_gets_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bare chroot has a /dev/shm that only root may write."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "good.jsonl").write_text(FILES["good.jsonl"] + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", denied)
    assert main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert err.endswith("without a writable /dev/shm (Permission denied); give --jobs 1\n")
    assert err.count("\n") == 1
    assert not out


@pytest.mark.parametrize("given", ["3m", "180", "180s"])
def test_a_time_may_have_a_unit(given: str) -> None:
    from forebay.traces.ground.command_line.options import time_option

    assert time_option(given) == 180.0
