"""Check the gains that `forebay tune` predicts on a real vLLM: four traces, before and after.

    python tests/bench/tune_vllm_cpu.py before --out runs/tune       (about four minutes)
    python tests/bench/tune_vllm_cpu.py tune --out runs/tune
    python tests/bench/tune_vllm_cpu.py after --out runs/tune        (about three minutes)
    python tests/bench/tune_vllm_cpu.py show --out runs/tune

`before` serves a small model by a vLLM on this machine's CPU. It replays a trace for the
calibration, and four others under the flags that an operator may have. `tune` fits the constants
and searches the flags in virtual time. `after` serves each trace under the flags that were found.
Keep other work away from the first and the third: server and client need a core each.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from pyarrow.parquet import read_table
from vllm_cpu import BLOCKS, CONTEXT, PEAKS, SIZE, forebay, load
from vllm_server import BLOCK_SIZE, MISSING, vllm_python, vllm_server, write_model

from forebay.replay.plan.slo import meets, parse_slos

Flags = dict[str, int]

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
    return {**case.before, **changed}


def after(out: Path, python: str, repeat: int, names: Sequence[str]) -> None:
    """Serve the traces under the flags that were found."""
    for case in chosen(names):
        with served(out, python, found(out, case)) as url:
            replay(out, case.name, url, f"{case.name}-after-{repeat}", case.slo)


def measured(out: Path, case: Case, when: str) -> list[float]:
    """The share of the requests in time, of each run of a trace."""
    slos = parse_slos(case.slo, ("chat", "document"))
    shares = []
    for run in sorted(out.glob(f"{case.name}-{when}-[0-9]")):
        rows = read_table(run / "requests.parquet").to_pylist()
        met = [
            meets(slos, row["bucket"], {
                "ttft": row["ttft_response_s"], "e2e": row["e2e_response_s"],
                "tpot": row["tpot_s"], "stall": row["stall_s"],
            })
            for row in rows
        ]  # fmt: skip
        shares.append(sum(met) / len(met))
    return shares


def show(out: Path) -> None:
    """Print the predicted and the measured share of the requests in time, and the gain."""
    lines = []
    for case in CASES:
        told = json.loads((out / f"{case.name}.tune.json").read_text())
        predicted = [told[when]["attainment"] for when in ("start", "best")]
        runs = [measured(out, case, when) for when in ("before", "after")]
        shares = [mean(each) for each in runs]
        lines.append({
            "trace": case.name, "targets": case.slo,
            "before": case.before, "after": found(out, case),
            "predicted": predicted, "measured": shares, "runs": runs,
            "predicted_gain": predicted[1] - predicted[0], "measured_gain": shares[1] - shares[0],
        })  # fmt: skip
        line = lines[-1]
        print(f"{case.name:10} predicted {predicted[0]:.1%} -> {predicted[1]:.1%}, measured "
              f"{shares[0]:.1%} -> {shares[1]:.1%}; gain {line['predicted_gain'] * 100:.1f} and "
              f"{line['measured_gain'] * 100:.1f} points; {runs}")  # fmt: skip
    (out / "result.json").write_text(json.dumps(lines, indent=1) + "\n")


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
    if given.stage in ("tune", "show"):
        (tune if given.stage == "tune" else show)(given.out)
    else:
        (before if given.stage == "before" else after)(given.out, python, given.repeat, given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
