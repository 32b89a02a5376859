"""Calibrate on one run of a real H200, and judge the fit on a run that it has not seen.

    python tests/bench/calibrated_h200.py     (some minutes; writes results/calibrated-h200.json)
    make docs-figures                         (writes the table of docs/explanation/simulator.md)

The runs are in tests/data/h200-2026-11-26: vLLM 0.26.0 without and with
--long-prefill-token-threshold 2048. Both commands are those that a user types.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from paths import DATA

RESULT = Path(__file__).with_name("results") / "calibrated-h200.json"
RUNS = DATA / "h200-2026-11-26"
SERVER = (
    "--trace", str(RUNS / "t4.jsonl"), "--model", "llama-3-8b", "--gpu", "h200",
    "--vllm-version", "0.26", "--async-scheduling", "--max-model-len", "131072",
    "--max-num-seqs", "256", "--max-num-batched-tokens", "8192",
)  # fmt: skip
FLAGS = {"direct-4": (), "flag-direct-4": ("--long-prefill-token-threshold", "2048")}
NAMES = {"direct-4": "the run without", "flag-direct-4": "the run with"}
SHOWN = (("ttft", 0.5), ("ttft", 0.99), ("tpot", 0.5), ("tpot", None), ("e2e", None))


def engine(*words: str) -> Any:
    """What `forebay engine` prints as data. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "forebay.proxy", "engine", *words, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def judged(run: str, *calibration: str) -> list[Any]:
    found = engine("validate", str(RUNS / run), *SERVER, *FLAGS[run], *calibration)
    lines: list[Any] = found["lines"]
    return lines


def main() -> None:
    told = []
    with TemporaryDirectory() as name:
        for run, other in (tuple(FLAGS), tuple(FLAGS)[::-1]):
            file = str(Path(name) / f"{run}.json")
            engine("calibrate", str(RUNS / run), *SERVER, *FLAGS[run], "--out", file)
            told += [
                {"fitted": None, "judged": other, "lines": judged(other)},
                {"fitted": run, "judged": other, "lines": judged(other, "--calibration", file)},
            ]
    RESULT.write_text(json.dumps(told, indent=1) + "\n")
    print(table())


def table() -> str:
    """The table of docs/explanation/simulator.md: errors with their 95 % intervals."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    heads = [f"{measure.upper()} {_quantile(q)}" for measure, q in SHOWN]
    yield f"| constants | judged on | {' | '.join(heads)} |"
    yield "| --- | --- |" + " --- |" * len(SHOWN)
    for one in json.loads(RESULT.read_text()):
        lines = {(line["measure"], line["quantile"]): line for line in one["lines"]}
        cells = [
            f"{line['error']:+.1%} ({100 * line['low']:+.0f} to {100 * line['high']:+.0f})"
            for line in map(lines.__getitem__, SHOWN)
        ]
        fitted = f"fitted to {NAMES[one['fitted']]}" if one["fitted"] else "as shipped"
        yield f"| {fitted} | {NAMES[one['judged']]} | {' | '.join(cells)} |"


def _quantile(quantile: float | None) -> str:
    return "mean" if quantile is None else f"p{100 * quantile:g}"


if __name__ == "__main__":
    main()
