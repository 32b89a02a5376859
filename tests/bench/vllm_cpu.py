"""Calibrate the simulated engine on one trace served by a real vLLM, and predict another.

    make bench-vllm-cpu                          (about a quarter of an hour)
    python tests/bench/vllm_cpu.py --out runs/vllm-cpu --requests 240 --repeats 3

Starts vLLM on this machine's CPU with a small model, replays a calibration trace and, several
times, a second trace of other lengths, sharing and arrivals; fits the step-time constants to the
first and plays the second in virtual time. Prints measured beside predicted, the spread of the
measured values over the repeats, and how well the constants meet their own trace. Run it on a
quiet machine: server and client need a core each, and whatever else runs is measured too.
`--analyse` only computes again from what an earlier run left in --out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from vllm_server import MISSING, ModelSize, vllm_python, vllm_server, write_model

from forebay.replay.engine.config import EngineConfig
from forebay.replay.validation.fit_run import (
    FitLine,
    compared,
    hit_ratio,
    predict,
)
from forebay.replay.validation.measured import read_runs
from forebay.traces.formats import open_trace

SIZE = ModelSize(hidden=128, layers=4, heads=4, kv_heads=2, ffn=256)
BATCHED_TOKENS, SEQS, CONTEXT, BLOCKS = 2_048, 128, 16_384, 8_000
CALIBRATION = (
    "--users 20 --documents 24 --zipf 0.8 --document-tokens lognormal:2500,0.8,300,7800 "
    "--question-tokens uniform:20,200 --output-tokens uniform:8,96 --chat-share 0.5 "
    "--chat-tokens uniform:100,1500 --chat-output-tokens uniform:16,160 --rate 2 --seed 1"
)
OTHER = (
    "--users 40 --documents 16 --zipf 1.1 --document-tokens uniform:500,7000 "
    "--question-tokens uniform:10,400 --output-tokens uniform:16,64 --chat-share 0.65 "
    "--chat-tokens lognormal:600,0.7,100,4000 --chat-output-tokens uniform:8,200 --rate 2 --seed 7"
)
BURSTS = ("--arrivals", "gamma:1.5", "--rate", "2", "--seed", "5")
PEAKS = """
import json, time, torch
torch.set_num_threads(1)
def best(call, work):
    rates = []
    for _ in range(5):
        start = time.perf_counter(); call(); rates.append(work / (time.perf_counter() - start))
    return max(rates)
n, flops = 2048, 0.0
for kind in (torch.bfloat16, torch.float32):
    a = torch.randn(n, n).to(kind)
    flops = max(flops, best(lambda: torch.mm(a, a), 2 * n**3))
x = torch.ones(1 << 26)
print(json.dumps({"name": "cpu-core", "peak_flops": flops, "bandwidth": best(x.sum, 4 * len(x)),
                  "memory_gib": 2.0, "multiprocessors": 1}))
"""
"""What stands for the data sheet: the largest matrix product and read rate of one core."""


def forebay(*words: str) -> str:
    """Standard output of one command; raises CalledProcessError where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "forebay.proxy", *words], stdout=subprocess.PIPE, check=True
    )
    return done.stdout.decode()


def load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def measure(out: Path, python: str, requests: int, repeats: int) -> None:
    """Serve, replay, leave traces and runs in `out`."""
    gpu = subprocess.run([python, "-c", PEAKS], stdout=subprocess.PIPE, check=True).stdout
    (out / "gpu.json").write_bytes(gpu)
    write_model(out / "model", SIZE)
    for name, words in (("calibration", CALIBRATION), ("other", OTHER)):
        trace = out / f"{name}.jsonl"
        forebay("traces", "synth", "documents", *words.split(), "--requests", str(requests),
                "-o", str(trace))  # fmt: skip
    flags = ("--max-num-batched-tokens", str(BATCHED_TOKENS), "--max-num-seqs", str(SEQS),
             "--max-model-len", str(CONTEXT), "--num-gpu-blocks-override", str(BLOCKS))  # fmt: skip
    start = time.monotonic()
    with vllm_server(python, out / "model", out / "vllm.log", *flags) as url:
        print(f"vLLM up after {time.monotonic() - start:.0f} s", flush=True)
        for number in range(repeats):
            for name, arrivals in (("calibration", ()), ("other", BURSTS)):
                print(f"{name} {number + 1} of {repeats}; load {load()}", flush=True)
                # A new salt each time: nothing is left in the cache from the run before.
                forebay("replay", str(out / f"{name}.jsonl"), "--target", url, *arrivals,
                        "--out", str(out / f"{name}-{number}"), "--salt", f"{name}{number}",
                        "--warmup", "3", "--quiet")  # fmt: skip
        print(f"load afterwards {load()}", flush=True)


def analyse(out: Path) -> dict[str, Any]:
    """Fit, predict, compare; prints the tables and returns them."""
    runs = {
        name: sorted(out.glob(f"{name}-[0-9]*"), key=lambda path: int(path.name.split("-")[1]))
        for name in ("calibration", "other")
    }
    model, gpu, file = out / "model" / "config.json", out / "gpu.json", out / "fitted.json"
    began = time.monotonic()
    print(
        forebay(
            "engine", "calibrate", *map(str, runs["calibration"]),
            "--trace", str(out / "calibration.jsonl"), "--model", str(model), "--gpu", str(gpu),
            "--max-num-batched-tokens", str(BATCHED_TOKENS), "--max-num-seqs", str(SEQS),
            "--block-size", "32", "--num-gpu-blocks-override", str(BLOCKS),
            "--out", str(file), "--force",
        )
    )  # fmt: skip
    fitted_s = time.monotonic() - began
    config = EngineConfig(
        str(model), str(gpu), max_model_len=CONTEXT, max_num_batched_tokens=BATCHED_TOKENS,
        max_num_seqs=SEQS, block_size=32, num_gpu_blocks_override=BLOCKS, calibration=file,
    )  # fmt: skip
    trace = list(open_trace(out / "other.jsonl"))
    singles = [read_runs([run], trace) for run in runs["other"]]
    predicted = predict(singles[0], config)
    lines = [compared(one, predicted) for one in singles]
    print(f"fitted in {fitted_s:.0f} s; the other trace, {len(trace)} requests, "
          f"{len(singles)} repeats:")  # fmt: skip
    rows = [_row(repeats) for repeats in zip(*lines, strict=True)]
    _print_rows(rows)
    hits = {"measured": hit_ratio(singles[0]), "predicted": hit_ratio(predicted)}
    equal = sum(a.cached_tokens == b.cached_tokens
                for a, b in zip(singles[0], predicted, strict=True))  # fmt: skip
    print(f"prefix hits: measured {hits['measured']:.4f}, predicted {hits['predicted']:.4f}; "
          f"cached_tokens equal in {equal} of {len(trace)} requests")  # fmt: skip
    print(_reached(rows))
    return {"rows": rows, "hit_ratio": hits, "equal_cached_tokens": equal, "fit_s": fitted_s,
            "requests": len(trace), "peak": json.loads(gpu.read_text())}  # fmt: skip


def _row(repeats: Sequence[FitLine]) -> dict[str, Any]:
    """One quantile over the repeats: the median of the measured ones is the measured one."""
    measured = sorted(line.measured_s for line in repeats)
    middle = median(measured)
    one = repeats[0]
    return {
        "measure": one.measure,
        "quantile": one.quantile,
        "lowest_s": measured[0],
        "measured_s": middle,
        "highest_s": measured[-1],
        "spread": (measured[-1] - measured[0]) / middle,
        "predicted_s": one.model_s,
        "error": one.model_s / middle - 1,
    }


def _share(quantile: float | None) -> str:
    return "mean" if quantile is None else f"p{quantile * 100:g}"


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    print("measure       measured (lowest - highest)  spread  predicted   error")
    for row in rows:
        print(
            f"{row['measure']:4} {_share(row['quantile']):5} {row['measured_s'] * 1e3:9.1f} ms "
            f"({row['lowest_s'] * 1e3:7.1f} - {row['highest_s'] * 1e3:7.1f})  {row['spread']:6.1%} "
            f"{row['predicted_s'] * 1e3:8.1f} ms  {row['error']:+6.1%}"
        )


def _reached(rows: Sequence[dict[str, Any]]) -> str:
    errors = {row["quantile"]: abs(row["error"]) for row in rows if row["measure"] == "ttft"}
    words = []
    for quantile, most in ((0.5, 0.15), (0.99, 0.25)):
        verdict = "reached" if errors[quantile] <= most else "not reached"
        words.append(f"TTFT p{quantile * 100:g} within {most:.0%}: {verdict}")
    return "; ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/vllm-cpu"), help="a new folder")
    parser.add_argument("--requests", type=int, default=240, help="in each trace")
    parser.add_argument("--repeats", type=int, default=3, help="of each replay")
    parser.add_argument("--analyse", action="store_true", help="measure nothing, compute again")
    given = parser.parse_args()
    if not given.analyse:
        python = vllm_python()
        if python is None:
            print(MISSING, file=sys.stderr)
            return 2
        if given.out.exists():
            print(f"--out {given.out}: exists; give a new folder, or --analyse", file=sys.stderr)
            return 2
        given.out.mkdir(parents=True)
        measure(given.out, python, given.requests, given.repeats)
    result = analyse(given.out)
    (given.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
