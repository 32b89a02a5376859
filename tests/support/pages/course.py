"""The figures of docs/research/course.md, from results of studies and of other commands.

PYTHONPATH=tests/support python tests/support/pages/course.py

plays COMMANDS again, or those that are named, which takes a minute, and writes their figures to
tests/bench/results/course.json. `make studies` does so after the studies, then it writes the pages.
"""

import io
import json
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fakes.course_models import MODELS
from pages import real_model
from pages.doc_studies import kept, results, rounded
from paths import RESULTS, ROOT
from result_lines import markdown_table

from forebay.analysis.experiments import STUDIES
from forebay.analysis.experiments.result import Column, cells_of
from forebay.analysis.experiments.studies.hol_fleet import HolFleet
from forebay.proxy.cli import main

PAGE = ROOT / "docs/research/course.md"
DATA = RESULTS / "course.json"
PHASES = "--lengths 256,512,2k --batches 1,16 --prompt-tokens 512"
CHATS = "traces synth chat-beside-documents --duration 5m -o trace.jsonl"
POOLS = "traces synth chat-beside-documents --duration 5m --document-tokens 60000 -o pools.jsonl"
SIZED_USERS, SIZED_TOKENS = (50, 200), (8_000, 32_000, 100_000)
VISITS = (
    "traces synth documents --documents 40 --document-tokens 60000 --rate 0.3 --duration 20m "
    "-o visits.jsonl"
)
HOST_GIB = ("none", "100", "300")
VISIT_FIGURES = ("hit_ratio", "ttft_ms.all.p50", "ttft_ms.all.p95", "busy.0")
COMMANDS: dict[str, str] = {
    "7b": f"experiment phases --target sim:7b@a100 {PHASES}",
    "13b": f"experiment phases --target sim:13b@a100 {PHASES}",
    "70b": f"experiment phases --target sim:70b@a100 --tensor-parallel-size 4 {PHASES}",
    "4090": "experiment saturation --target sim:1.5b@rtx-4090 --max-num-seqs 16 "
    "--concurrency 1,2,4,8,16,32",
    "100k": "size --users 50 --document-tokens 100000 --pools --price-per-gpu-hour 4",
    "14b, 2": "size --users 50 --document-tokens 100000 --model qwen2.5-14b "
    "--tensor-parallel-size 2",
    "14b, 4": "size --users 50 --document-tokens 100000 --model qwen2.5-14b "
    "--tensor-parallel-size 4",
    "tpot": "simulate trace.jsonl --slo tpot=50ms",
    "pools": "simulate pools.jsonl --gpus 4 --load 0.7 --sweep pools=none,3+1",
    "visits": f"simulate visits.jsonl --gpus 1 --sweep kv_offloading_size={','.join(HOST_GIB)}",
}
COMMANDS |= {
    f"{users} of {tokens}": f"size --users {users} --document-tokens {tokens} --quick"
    for users in SIZED_USERS
    for tokens in SIZED_TOKENS
}
"""Commands by the name that HERE uses. Models are those of the course, as config.json."""
WRITTEN = (CHATS, POOLS, VISITS)
HERE: Mapping[int, str] = {
    1: "{prefill|ttft_s|prompt_tokens=1024}, {prefill|ttft_s|prompt_tokens=4096}, "
    "{prefill|ttft_s|prompt_tokens=32768}, {prefill|ttft_s|prompt_tokens=65536}, "
    "{prefill|ttft_s|prompt_tokens=128000}",
    2: "{prefill|tokens_per_s|prompt_tokens=4096} at 4,096, "
    "{prefill|tokens_per_s|prompt_tokens=128000} at 128k",
    6: "{decode|tokens_per_s|batch=1|output_tokens=128}, "
    "{decode|tokens_per_s|batch=1|output_tokens=2048}",
    8: "{phases|ratio|phase=prefill|prompt_tokens=4096}",
    13: "{hol|worst_gap_s|max_num_batched_tokens=131072}",
    14: "{hol|worst_gap_s|max_num_batched_tokens=512}",
    16: "chat p99 {hol-fleet|ttft_p99_s|way=proxy|prefill=chunked} instead of "
    "{hol-fleet|ttft_p99_s|way=round robin|prefill=chunked}; longest stall "
    "{hol-fleet|stall_s|way=proxy|prefill=chunked}, with the flag "
    "{hol-fleet|stall_s|way=proxy|prefill=the flag}, with the scheduler class "
    "{hol-fleet|stall_s|way=proxy|prefill=the scheduler class}",
    18: "knee at {saturation|load|knee=knee} in flight, "
    "{saturation|requests_per_s|knee=knee}, {saturation|tokens_per_s|knee=knee} tokens/s",
    19: "{shared-document|cold|way=proxy|phase=first} of 50 users waits for the prefill; the "
    "others {shared-document|ttft_s|way=proxy|phase=the others}, at worst "
    "{shared-document|ttft_max_s|way=proxy|phase=the others}; round robin at worst "
    "{shared-document|ttft_max_s|way=round robin|phase=the others}",
    20: "{shared-document|ttft_s|way=proxy|phase=one more}, cold "
    "{shared-document|ttft_s|way=proxy|phase=first}",
    21: "{shared-document|hit_ratio|way=proxy|phase=the others} of the others' tokens",
    22: "each user adds {shared-document|kv_tokens_per_user|way=proxy|phase=the others} tokens",
    23: "goodput at 3 times capacity {flood|goodput_per_s|way=proxy|load=3.0}, round robin "
    "{flood|goodput_per_s|way=round robin|load=3.0}",
    26: "50 users of 100k: {100k|recommended_gpus} H200",
    27: "50 users: {14b, 2|servers} servers of {14b, 2|gpus_per_server}",
    32: "SmolLM2-135M has {a real model|score:.1f} on SQuALITY in a context of "
    "{a real model|context:,}",
    34: "SmolLM2-135M finds {a real model|direct} of {a real model|asked} in 512 to 7,168 tokens, "
    "and {a real model|proxy} through the proxy",
    36: "7B {7b|seconds|phase=prefill|prompt_tokens=512} and "
    "{7b|seconds|phase=decode|batch=1}; 13B {13b|seconds|phase=prefill|prompt_tokens=512} and "
    "{13b|seconds|phase=decode|batch=1}; 70B on four "
    "{70b|seconds|phase=prefill|prompt_tokens=512} and {70b|seconds|phase=decode|batch=1}",
    37: "{phases|static_slots|phase=decode|batch=16} of 16 slots, played; to refill each at once "
    "gives {phases|continuous_tokens_per_s|phase=decode|batch=16} tokens/s instead of "
    "{phases|static_tokens_per_s|phase=decode|batch=16}, one request at a time "
    "{phases|continuous_tokens_per_s|phase=decode|batch=1}",
    38: "{phases|flop_per_byte|phase=prefill|prompt_tokens=512} FLOP/byte",
    39: "{phases|flop_per_byte|phase=decode|batch=1} FLOP/byte",
    42: "{memory|saved_share|max_model_len=2048}",
    45: "four H200 at 70 %, chats beside documents of 60k: longest stall "
    "{pools|1.stall_ms.all.max:.0f} "
    "ms in pools of 3+1, {pools|0.stall_ms.all.max:.0f} ms in four that do both",
    52: "{7b|bound|phase=prefill|prompt_tokens=512}, "
    "{7b|peak_share|phase=prefill|prompt_tokens=512} of peak",
    57: "Qwen2.5-14B, 100k, 50 users: {14b, 2|recommended_gpus} GPUs in servers of 2, "
    "{14b, 4|recommended_gpus} in servers of 4",
    73: "{saturation|ttft_p99_s|load=1} alone, {saturation|ttft_p99_s|load=16} at 16, "
    "{saturation|ttft_p99_s|load=512} at 512",
    75: "{4090|tokens_per_s|load=1} to {4090|tokens_per_s|load=16} tokens/s",
    76: "16 is the cap itself: {4090|tokens_per_s|load=16} tokens/s; with 256, "
    "{4090|facts.with_advised.tokens_per_s:,.0f}",
    103: "prefill and decode of a vLLM on a CPU within {a real model|worst:.0%} of the median of "
    "three runs, which differ up to {a real model|spread:.1f} times",
    108: "16 MiB, 512 MiB, {memory|matrix_gib|max_model_len=2048} GiB",
    110: "{memory|gain|max_model_len=2048}",
    112: "{4090|tokens_per_s|load=16} for {4090|tokens_per_s|load=1} tokens/s",
    119: "{tpot|attainment:.1%} in time",
    123: "50 users of 100k, 4 dollars for an hour of an H200: {100k|recommended_gpus} that do both "
    "cost {100k|cost.per_hour:.0f} an hour with a spare, {100k|cost.per_busy_gpu_hour:.2f} for "
    "each that computes; pools of {100k|pools.prefill} and {100k|pools.decode} "
    "{100k|pools.cost.per_hour:.0f} and {100k|pools.cost.per_busy_gpu_hour:.2f}",
}
"""What Forebay shows, by line: {study or command|key|cell=value ...}, or {command|path:format}."""
STUDY_KINDS = {
    kind.NAME: kind
    for kind in (
        getattr(import_module(f"forebay.analysis.experiments.studies.{module}"), name)
        for module, name in (place.split(":") for place in STUDIES)
    )
}
PLACE = re.compile(r"\{([^{}]+)\}")
ROW = re.compile(
    r"^(- \*\*(\d+)\. (?P<item>.+?)\*\*(?: \((?P<command>.+?)\))?: )"
    r"(?P<here>.+?)(\.(?: (?P<why>.+))?)$",
    re.MULTILINE,
)
"""A line of the page: number, item, command, what Forebay shows, and why it differs."""


def here(number: int) -> str:
    """What Forebay shows in a line, from the committed results."""
    return PLACE.sub(lambda place: _value(*place[1].split("|")), HERE[number])


def _value(name: str, key: str, *where: str) -> str:
    found: dict[str, Any] = results().get(name) or commands().get(name) or real_model.figures()
    if not where:
        path, _, form = key.partition(":")
        return format(found.get("figures", found)[path], form)
    wanted = dict(item.split("=", 1) for item in where)
    (row,) = [r for r in found["rows"] if all(str(r.get(k)) == v for k, v in wanted.items())]
    (cell,) = cells_of(Column(key, "", kinds_of(found["command"])[key]), [row[key]])
    return cell


def kinds_of(command: str) -> dict[str, str]:
    """The kind of each column of a study, by its key."""
    kind = HolFleet if "--fleet" in command else STUDY_KINDS[command.split()[2]]
    return {column.key: column.kind for column in kind.COLUMNS}


@cache
def commands() -> dict[str, Any]:
    """The committed results of COMMANDS by name."""
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def play(name: str, folder: Path) -> dict[str, Any]:
    """Run a command in `folder`, which has the traces, and keep what HERE shows of it."""
    words = shlex.split(COMMANDS[name])
    for place, word in enumerate(words):
        model = word.removeprefix("sim:").partition("@")[0]
        if model in MODELS:
            (folder / f"{model}.json").write_text(json.dumps(MODELS[model]))
            words[place] = word.replace(model, str(folder / f"{model}.json"), 1)
        elif word.endswith(".jsonl"):
            words[place] = str(folder / word)
    studied = words[0] == "experiment"
    words += ["--out", str(folder / name), "--force"] if studied else ["--json"]
    # Run it, and read what it printed or wrote.
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(words) == 0, COMMANDS[name]
    text = printed.getvalue()
    if studied:
        text = (folder / name / "results.json").read_text(encoding="utf-8")
    found = json.loads(text)
    kept_parts = {key: kept(found)[key] for key in ("columns", "rows")} if studied else {}
    figures = {path: rounded(_at(found, path)) for path in _paths(name)}
    return {"command": f"forebay {COMMANDS[name]}", "figures": figures, **kept_parts}


def _paths(name: str) -> list[str]:
    """The paths of a command's JSON that HERE or the table of sizes shows."""
    if " of " in name:
        return ["binding.resource", "recommended_gpus", "with_one_spare"]
    if name == "visits":
        return [f"{case}.{path}" for case in range(len(HOST_GIB)) for path in VISIT_FIGURES]
    places = [place.split("|") for row in HERE.values() for place in PLACE.findall(row)]
    return sorted({key.partition(":")[0] for of, key, *where in places if of == name and not where})


def _at(found: Any, path: str) -> Any:
    for step in path.split("."):
        if found is None:
            return None
        found = found[int(step)] if step.isdigit() else found[step]
    return found


def write_traces(folder: Path) -> None:
    """Write the traces that COMMANDS read."""
    for line in WRITTEN:
        words = shlex.split(line)
        assert main([*words[:-1], str(folder / words[-1])]) == 0


def sizes() -> str:
    """The table of the lesson on sizing."""
    rows = []
    for users in SIZED_USERS:
        for tokens in SIZED_TOKENS:
            found = commands()[f"{users} of {tokens}"]["figures"]
            gpus, spare = found["recommended_gpus"], found["with_one_spare"]
            rows.append(
                [f"{users}", f"{tokens:,}", f"{gpus}", f"{spare}", found["binding.resource"] or "–"]
            )
    heads = ["users", "document tokens", "H200", "with a spare", "what binds"]
    return markdown_table(heads, rows)


def visits() -> str:
    """What copies in the host's memory bring, for the lesson on the KV cache."""
    found, rows = commands()["visits"], []
    for case, size in enumerate(HOST_GIB):
        hit, p50, p95, busy = (found["figures"][f"{case}.{path}"] for path in VISIT_FIGURES)
        rows.append(
            [
                size if size == "none" else f"{size} GiB",
                f"{hit:.0%}",
                f"{p50 / 1e3:.2f} s",
                f"{p95 / 1e3:.2f} s",
                f"{busy:.0%}",
            ]
        )
    heads = ["host memory", "tokens found", "TTFT p50", "TTFT p95", "GPU busy"]
    return f"```\nforebay {VISITS}\n{found['command']}\n```\n\n{markdown_table(heads, rows)}"


def renewed(page: str) -> str:
    """Return the page of the course with the figures of its rows renewed."""

    def row(found: re.Match[str]) -> str:
        number = int(found[2])
        return f"{found[1]}{here(number)}{found[6]}" if number in HERE else found[0]

    return ROW.sub(row, page)


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        write_traces(Path(made))
        played = {name: play(name, Path(made)) for name in sys.argv[1:] or COMMANDS}
    if len(played) < len(COMMANDS):
        played = {**commands(), **played}
    DATA.write_text(json.dumps(played, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
