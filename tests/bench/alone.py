"""Forebay and vLLM alone on one, two and four GPUs (python tests/bench/alone.py --write).

Virtual time: chats beside documents of 120,000 tokens, each asked about five times, at 80 % of what
the engines complete round robin. *Alone* is a client that asks the engines in turn. All seeds count
together; a rejected request is not in time. Targets are those of `simulate`: 2 s and 15 s.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from arena_policies import FOREBAY
from arena_workloads import ENGINE, at_load
from guard import CHUNK, Judged, judged, play_rows
from guard_workloads import beside
from paths import BENCHMARKS

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.fleet import SimOutcome

PAGE = BENCHMARKS / "results.md"
BEGIN, END = "<!-- generated: tests/bench/alone.py --write -->", "<!-- end -->"
GPUS = (1, 2, 4)
LOAD = 0.8
UNTIL_S = 200.0  # of each seed's trace, before its arrivals are scaled to the load
RATES = 3.35, 0.165  # chats and documents a second for each GPU


def play(gpus: int, engine: EngineConfig, policy: str, seeds: int) -> Judged:
    chats_per_s, documents_per_s = (rate * gpus for rate in RATES)
    outcomes: list[SimOutcome] = []
    for seed in range(seeds):
        made = beside(5, chats_per_s, documents_per_s)(seed, 1)
        rows = at_load([row for row in made if row.arrival_s < UNTIL_S], LOAD, (ENGINE,) * gpus)
        outcomes += play_rows(rows, policy, engine, gpus)
    return judged(outcomes)


def table(seeds: int) -> Iterator[str]:
    yield "| GPUs | flags | chats' p99 | documents' p99 | documents, ratio | in time | rejected |"
    yield "| --- " * 7 + "|"
    for chunk, flags in ((CHUNK, "the flag"), (0, "default")):
        engine = replace(ENGINE, long_prefill_token_threshold=chunk)
        for gpus in GPUS:
            ours, alone = (play(gpus, engine, policy, seeds) for policy in (FOREBAY, "direct"))
            yield (
                f"| {gpus} | {flags} | {ours.chat_p99_s:.2f} s, {alone.chat_p99_s:.1f} s "
                f"| {ours.document_p99_s:.1f} s, {alone.document_p99_s:.1f} s "
                f"| {ours.document_p99_s / alone.document_p99_s:.2f} "
                f"| {ours.in_time:.1%}, {alone.in_time:.1%} | {ours.rejected:.1%} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the table into results.md")
    options = parser.parse_args()
    lines = "\n".join(table(options.seeds))
    print(lines)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
