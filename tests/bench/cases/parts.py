"""Play other projects' cases with one part of the policy switched off each.

    python tests/bench/cases/parts.py [--load 1.5] [--flag] [--seed 0] [--only PART] [--minutes 10]
    python tests/bench/cases/parts.py --show

results/parts_cases.json has of each part and cell: % of requests in time; the p99 of TTFT of chats
(prompts of up to 5,000 tokens) and documents that were served, in seconds; % of all requests that
are rejected later than .1 s; % of the admitted that are late. What is there is
not played again. Two recorded traces are played on two H200 with Llama-3-8B, at shares of what
these compute. Runs are shorter than those of cases.py.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from math import exp, isfinite, log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from arena_ablations import NOISE, WITHOUT, replaced
from arena_workloads import ENGINE, ENGINES, at_load, azure, mooncake
from case_list import CASES
from paths import RESULTS, SHARED
from play import AT_ONCE_S, CHAT_MOST, CHUNK, FOREBAY, TARGET_S, play, quantile

from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import Scenario, simulate

TABLE = RESULTS / "parts_cases.json"
WHOLE = "whole policy"
SECONDS = {
    "code-gen": 300.0, "b2b-saas": 150.0, "rag-8k": 150.0, "mix-c": 150.0, "mix-b": 150.0,
    "agentic": 200.0, "conversation": 150.0, "campi": 60.0, "tiered": 60.0, "toolagent": 60.0,
}  # fmt: skip
TRACES = {
    "Azure conversation": azure("conv_head", 1_500, 1_700),
    "Mooncake synthetic": mooncake("synthetic", 800, 180),
}
PARTS = [WHOLE, NOISE, *(part for part in reversed(WITHOUT) if part != NOISE)]  # newest first
Cells = dict[str, list[float | None]]


def played(name: str, load: float, flag: bool, seed: int) -> list[SimOutcome]:
    if name in CASES:
        case = CASES[name]
        return play(case, FOREBAY, [(SECONDS[name], load * case.capacity)], seed, flag=flag)
    engine = replace(ENGINE, long_prefill_token_threshold=CHUNK if flag else 0)
    rows = at_load(TRACES[name](seed, SHARED / "data"), load)
    return list(simulate(rows, Scenario(engine=engine, gpus=ENGINES)).outcomes)


def measured(outcomes: list[SimOutcome]) -> list[float | None]:
    ttft_s = np.array([np.nan if o.ttft_s is None else o.ttft_s for o in outcomes])
    chats = np.array([o.request.input_tokens <= CHAT_MOST for o in outcomes])
    rejected = np.array([o.reject is not None for o in outcomes])
    queued_s = np.array([0.0 if o.reject is None else o.reject.queued_s for o in outcomes])
    served = ~np.isnan(ttft_s)
    in_time = 100 * float((ttft_s <= np.where(chats, *TARGET_S)).mean())
    late = max(0.0, 100 - in_time - 100 * float(rejected.mean()))
    tails = [quantile(ttft_s[served & which], 0.99) for which in (chats, ~chats)]
    rejected_late = 100 * float((rejected & (queued_s > AT_ONCE_S)).mean())
    admitted_late = late / max(1e-9, float((~rejected).mean()))
    values = (in_time, *tails, rejected_late, admitted_late)
    return [float(f"{v:.4g}") if isfinite(v) else None for v in values]


def read() -> dict[str, Cells]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def write(table: dict[str, Cells]) -> None:
    lines = (f"{json.dumps(part)}: {json.dumps(cells)}" for part, cells in table.items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def changes(whole: Cells, cells: Cells) -> Iterator[tuple[str, float, list[float | None]]]:
    """Yield of each cell: points in time, and the ratios of the two p99, without / with."""
    for cell, values in cells.items():
        before = whole.get(cell)
        if before is not None:
            pairs = zip(values[1:3], before[1:3], strict=True)
            ratios = [a / b if a and b else None for a, b in pairs]
            yield cell, (values[0] or 0.0) - (before[0] or 0.0), ratios


def geometric(ratios: list[float | None]) -> float:
    logs = [log(ratio) for ratio in ratios if ratio]
    return 100 * (exp(sum(logs) / len(logs)) - 1) if logs else 0.0


def show(table: dict[str, Cells]) -> None:
    """Print a row of each part: means over cells, and the cells that change most."""
    rows, whole = [], table[WHOLE]
    for part in table.keys() - {WHOLE}:
        found = list(changes(whole, table[part]))
        points = {cell: change for cell, change, _ in found}
        mean = sum(points.values()) / len(points)
        worst = min(points, key=lambda cell: points[cell])
        best = max(points, key=lambda cell: points[cell])
        tails = [geometric([ratios[n] for _, _, ratios in found]) for n in (0, 1)]
        late = [
            sum((table[part][cell][n] or 0.0) - (whole[cell][n] or 0.0) for cell in points)
            / len(points)
            for n in (3, 4)
        ]
        row = (
            f"| {part} | {len(found)} | {mean:+.2f} | {tails[0]:+.0f} %, {tails[1]:+.0f} % | "
            f"{late[0]:+.2f}, {late[1]:+.2f} | {points[worst]:+.1f} ({worst}) | "
            f"{points[best]:+.1f} ({best}) |"
        )
        rows.append((mean, row))
    print("\n".join(row for _, row in sorted(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--load", type=float, default=1.5, help="share of the capacity")
    parser.add_argument("--flag", action="store_true", help="long_prefill_token_threshold 2048")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="parts that contain this, and the whole policy")
    parser.add_argument("--cells", nargs="+", default=[*SECONDS, *TRACES], help="cases and traces")
    parser.add_argument("--minutes", type=float, default=1e6, help="start nothing after so many")
    parser.add_argument("--show", action="store_true", help="print the table, play nothing")
    options = parser.parse_args()
    table, end_s = read(), time.monotonic() + 60 * options.minutes
    if options.show:
        return show(table)
    for part in PARTS:
        if part != WHOLE and options.only not in part:
            continue
        cells = table.setdefault(part, {})
        for name in options.cells:
            cell = f"{name} {options.load:g}{' flag' * options.flag} {options.seed}"
            if cell in cells or time.monotonic() > end_s:
                continue
            with replaced(() if part == WHOLE else WITHOUT[part]):
                cells[cell] = measured(played(name, options.load, options.flag, options.seed))
            write(table)
            print(part, cell, cells[cell], f"{time.process_time():.0f} s", flush=True)


if __name__ == "__main__":
    main()
