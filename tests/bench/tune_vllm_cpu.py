"""Check the gains that `forebay tune` predicts on a real vLLM: four traces, before and after.

    python tests/bench/tune_vllm_cpu.py before --out runs/tune       (about four minutes)
    python tests/bench/tune_vllm_cpu.py tune --out runs/tune
    python tests/bench/tune_vllm_cpu.py after --out runs/tune        (about three minutes)
    python tests/bench/tune_vllm_cpu.py show --out runs/tune

`before` serves a small model by a vLLM on this machine's CPU. It replays a trace for the
calibration, and four others under the flags that an operator may have. `tune` fits the constants
and searches the flags in virtual time. `after` serves each trace under the flags that were found.
`show` writes results/tune-vllm-cpu.json, and `make docs-figures` the table of the page. Keep other
work away from the first and the third: server and client need a core each.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
from pyarrow.parquet import read_table
from vllm_cpu import BLOCKS, CONTEXT, PEAKS, SIZE, forebay, load
from vllm_server import BLOCK_SIZE, MISSING, vllm_python, vllm_server, write_model

from forebay.replay.plan.slo import meets, parse_slos

Flags = dict[str, int]
RESULT = Path(__file__).with_name("results") / "tune-vllm-cpu.json"
STRETCH, RESAMPLES = 5, 2_000
TITLES = {"documents": "chats beside documents", "shared": "shared documents",
          "seats": "answers that wait for a slot", "gaps": "gaps in answers"}  # fmt: skip
SHORT = {"max-num-batched-tokens": "step budget", "max-num-seqs": "`--max-num-seqs`",
         "long-prefill-token-threshold": "threshold"}  # fmt: skip

CPU_DEFAULTS: Flags = {"max-num-batched-tokens": 2_048, "max-num-seqs": 128}
ALWAYS: Flags = {"max-model-len": CONTEXT, "num-gpu-blocks-override": BLOCKS}
SIMULATED = (*("--vllm-version", "0.32", "--block-size", str(BLOCK_SIZE), "--no-async-scheduling"),)
CALIBRATION = (
    "--users 20 --documents 30 --zipf 0.5 --document-tokens uniform:1000,8000 "
    "--question-tokens uniform:20,200 --output-tokens uniform:8,60 --chat-share 0.7 "
    "--chat-tokens uniform:50,1500 --chat-output-tokens uniform:16,160 --rate 3.5 --requests 130 "
    "--seed 1"
)


@dataclass(frozen=True, slots=True)
class Case:
    """Traffic, its targets, and the flags before."""

    name: str
    trace: str
    slo: str
    before: Flags


CASES = (
    Case(
        "documents",
        "--users 60 --documents 200 --zipf 0 --document-tokens uniform:5200,7500 "
        "--question-tokens 30 --output-tokens uniform:8,24 --chat-share 0.8 "
        "--chat-tokens uniform:50,800 --chat-output-tokens uniform:8,40 --rate 3 --requests 110 "
        "--seed 11",
        "chat.ttft=600ms,document.ttft=4s",
        CPU_DEFAULTS,
    ),
    Case(
        "shared",
        "--users 60 --documents 12 --zipf 1.1 --document-tokens uniform:5200,8000 "
        "--question-tokens uniform:20,600 --output-tokens uniform:8,60 --chat-share 0.6 "
        "--chat-tokens uniform:50,1200 --chat-output-tokens uniform:8,60 --rate 4 "
        "--requests 120 --seed 12",
        "chat.ttft=800ms,document.ttft=6s",
        CPU_DEFAULTS,
    ),
    Case(
        "seats",
        "--users 60 --documents 1 --chat-share 1 --chat-tokens uniform:20,120 "
        "--chat-output-tokens uniform:120,360 --rate 8 --requests 160 --seed 13",
        "chat.ttft=300ms",
        {**CPU_DEFAULTS, "max-num-seqs": 4},
    ),
    Case(
        "gaps",
        "--users 60 --documents 200 --zipf 0 --document-tokens uniform:5200,7500 "
        "--question-tokens 30 --output-tokens uniform:8,24 --chat-share 0.85 "
        "--chat-tokens uniform:50,400 --chat-output-tokens uniform:60,240 --rate 4 --requests 140 "
        "--seed 14",
        "chat.stall=400ms,chat.ttft=600ms,document.ttft=5s",
        {**CPU_DEFAULTS, "max-num-batched-tokens": 8_192},
    ),
)


def chosen(names: Sequence[str]) -> list[Case]:
    return [case for case in CASES if not names or case.name in names]


def words_of(flags: Flags) -> tuple[str, ...]:
    return tuple(word for name, value in flags.items() for word in (f"--{name}", str(value)))


@contextmanager
def served(out: Path, python: str, flags: Flags) -> Iterator[str]:
    """A server with these flags, warm."""
    given = words_of({**ALWAYS, **flags})
    with vllm_server(python, out / "model", out / "vllm.log", *given) as url:
        yield url


def replay(out: Path, name: str, url: str, run: str, slo: str | None = None) -> None:
    """Replay the trace `name` into the folder `run`, with a new salt: nothing is cached before."""
    print(f"{run}; load {load()}", flush=True)
    targets = ("--slo", slo) if slo else ()
    forebay("replay", str(out / f"{name}.jsonl"), "--target", url, "--out", str(out / run),
            "--salt", run, "--warmup", "5", "--quiet", "--force", *targets)  # fmt: skip


def synth(out: Path, name: str, words: str) -> None:
    forebay("traces", "synth", "documents", *words.split(), "-o", str(out / f"{name}.jsonl"),
            "--force")  # fmt: skip


def before(out: Path, python: str, repeat: int, names: Sequence[str]) -> None:
    """Write the traces, and serve them and the one for the calibration."""
    if not out.exists():
        out.mkdir(parents=True)
        write_model(out / "model", SIZE)
        peaks = subprocess.run([python, "-c", PEAKS], stdout=subprocess.PIPE, check=True).stdout
        (out / "gpu.json").write_bytes(peaks)
        synth(out, "calibration", CALIBRATION)
        for case in CASES:
            synth(out, case.name, case.trace)
    by_flags: dict[tuple[str, ...], list[Case]] = {}
    for case in chosen(names):
        by_flags.setdefault(words_of(case.before), []).append(case)
    for cases in by_flags.values():
        with served(out, python, cases[0].before) as url:
            if cases[0].before == CPU_DEFAULTS and not (out / "calibration-0").exists():
                replay(out, "calibration", url, "calibration-0")
            for case in cases:
                replay(out, case.name, url, f"{case.name}-before-{repeat}", case.slo)


def tune(out: Path) -> None:
    """Fit the constants to the first run, and search the flags for each trace."""
    model, gpu, fitted = out / "model" / "config.json", out / "gpu.json", out / "fitted.json"
    engine = ("--model", str(model), "--gpu", str(gpu), *SIMULATED)
    given = words_of({**ALWAYS, **CPU_DEFAULTS})
    print(forebay("engine", "calibrate", str(out / "calibration-0"), "--trace",
                  str(out / "calibration.jsonl"), *engine, *given, "--out", str(fitted),
                  "--force"))  # fmt: skip
    for case in CASES:
        said = forebay(
            "tune", str(out / f"{case.name}.jsonl"), *engine, "--calibration", str(fitted),
            "--policy", "direct", "--slo", case.slo, *words_of({**ALWAYS, **case.before}), "--json",
        )  # fmt: skip
        (out / f"{case.name}.tune.json").write_text(said)
        found = json.loads(said)
        print(case.name, found["command"], found["start"], found["best"], flush=True)


def found(out: Path, case: Case) -> Flags:
    """The flags of the tuned server."""
    told = json.loads((out / f"{case.name}.tune.json").read_text())
    changed = {gain["flag"].replace("_", "-"): gain["value"] for gain in told["gains"]}
    changed.pop("api-server-count", None)  # this machine has one core for it and the client
    return {**case.before, **changed}


def after(out: Path, python: str, repeat: int, names: Sequence[str]) -> None:
    """Serve the traces under the flags that were found."""
    for case in chosen(names):
        with served(out, python, found(out, case)) as url:
            replay(out, case.name, url, f"{case.name}-after-{repeat}", case.slo)


def met(out: Path, case: Case, when: str) -> list[list[bool]]:
    """Which requests were in time, in the order of the trace, for each run."""
    slos = parse_slos(case.slo, ("chat", "document"))
    runs = []
    for run in sorted(out.glob(f"{case.name}-{when}-[0-9]")):
        rows = read_table(run / "requests.parquet").to_pylist()
        runs.append([
            meets(slos, row["bucket"], {
                "ttft": row["ttft_response_s"], "e2e": row["e2e_response_s"],
                "tpot": row["tpot_s"], "stall": row["stall_s"],
            })
            for row in sorted(rows, key=lambda row: row["intended_s"])
        ])  # fmt: skip
    return runs


def interval(gains: np.ndarray) -> tuple[float, float]:
    """A 95 % interval of the mean, by resampling stretches: neighbours fail together."""
    drawing, within = np.random.default_rng(0), np.arange(STRETCH)
    starts = drawing.integers(0, len(gains), (RESAMPLES, -(-len(gains) // STRETCH)))
    picked = (starts[:, :, None] + within).reshape(RESAMPLES, -1)[:, : len(gains)] % len(gains)
    low, high = np.quantile(gains[picked].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def predicted(told: dict[str, Any]) -> float:
    """The share in time under the flags that are measured: one process of the API server."""
    for gain in told["gains"]:
        if gain["flag"] == "api_server_count":
            return float(gain["without"]["attainment"])
    return float(told["best"]["attainment"])


def result(out: Path, case: Case) -> dict[str, Any]:
    """The predicted and the measured shares in time, and how far the measured gain can be told."""
    told = json.loads((out / f"{case.name}.tune.json").read_text())
    shares = [told["start"]["attainment"], predicted(told)]
    runs = [met(out, case, when) for when in ("before", "after")]
    before, after = (np.array(each, dtype=float) for each in runs)
    low, high = interval(after.mean(axis=0) - before.mean(axis=0))
    gain, tenth = after.mean() - before.mean(), 0.1 * (shares[1] - shares[0])
    return {
        "trace": case.name, "synth": case.trace, "targets": case.slo, "requests": before.shape[1],
        "before": case.before, "after": found(out, case), "predicted": shares,
        "measured": [[float(one.mean()) for one in each] for each in (before, after)],
        "gain": float(gain), "interval": [low, high],
        "requests_for_a_tenth": round(before.shape[1] * ((high - low) / 2 / tenth) ** 2),
    }  # fmt: skip


def show(out: Path, python: str) -> None:
    """Write the result of each trace, and print the table of the page."""
    asked = [python, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
    served_by = subprocess.run(asked, stdout=subprocess.PIPE, check=True).stdout.decode().strip()
    lines = [result(out, case) for case in CASES]
    told = {"vllm_cpu": served_by, "calibration": CALIBRATION, "traces": lines}
    RESULT.write_text(json.dumps(told, indent=1) + "\n")
    print(table())


def table() -> str:
    """The table of docs/how-to/tune-vllm.md."""
    lines = [
        "| trace | flags before, and found | in time, predicted | measured, each run | "
        "gain, predicted | measured, 95 % interval |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in json.loads(RESULT.read_text())["traces"]:
        start, best = one["predicted"]
        before, after = (
            ", ".join(f"{100 * share:.1f}" for share in each) for each in one["measured"]
        )
        low, high = (100 * edge for edge in one["interval"])
        changed = {name: value for name, value in one["after"].items()
                   if one["before"].get(name) != value}  # fmt: skip
        old = {name: one["before"][name] for name in changed if name in one["before"]}
        lines.append(
            f"| {TITLES[one['trace']]} | {_words(old)}; {_words(changed)} | {100 * start:.1f} -> "
            f"{100 * best:.1f} % | {before} -> {after} % | {100 * (best - start):.1f} points | "
            f"{100 * one['gain']:.1f} ({low:.1f} to {high:.1f}) |"
        )
    return "\n".join(lines)


def _words(flags: Flags) -> str:
    return ", ".join(f"{SHORT[name]} {value:,}" for name, value in flags.items())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("stage", choices=("before", "tune", "after", "show"))
    parser.add_argument("--out", type=Path, default=Path("runs/tune-vllm-cpu"), help="a folder")
    parser.add_argument("--repeat", type=int, default=0, help="number of this measurement")
    parser.add_argument("--only", nargs="*", default=(), help="names of traces; default: all")
    given = parser.parse_args(words)
    python = vllm_python()
    if python is None:
        print(MISSING, file=sys.stderr)
        return 2
    if given.stage == "tune":
        tune(given.out)
    elif given.stage == "show":
        show(given.out, python)
    else:
        (before if given.stage == "before" else after)(given.out, python, given.repeat, given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
