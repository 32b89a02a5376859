"""Forebay and vLLM alone on one, two and four GPUs (python tests/bench/alone.py --write).

Virtual time: chats beside documents of 120,000 tokens, each asked about five times, at 80 % of what
the engines complete round robin. *Alone* is a client that asks the engines in turn. All seeds count
together; a rejected request is not in time. Targets are those of `simulate`: 2 s and 15 s.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
from arena_policies import FOREBAY, new_policy
from arena_score import CHAT_MOST, quantile
from arena_workloads import ENGINE, Load, Rows, at_load
from guard import CHUNK, TARGET_S
from guard_workloads import beside
from paths import BENCHMARKS

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet, SimOutcome

PAGE = BENCHMARKS / "results.md"
BEGIN, END = "<!-- generated: tests/bench/alone.py --write -->", "<!-- end -->"
GPUS = (1, 2, 4)
LOAD = 0.8
UNTIL_S = 200.0  # of each seed's trace, before its arrivals are scaled to the load
RATES = 3.35, 0.165  # chats and documents a second for each GPU


def play(gpus: int, engine: EngineConfig, policy: str, seed: int) -> Sequence[SimOutcome]:
    chats_per_s, documents_per_s = (rate * gpus for rate in RATES)
    made = beside(5, chats_per_s, documents_per_s)(seed, 1)
    rows = at_load([row for row in made if row.arrival_s < UNTIL_S], LOAD, (ENGINE,) * gpus)
    names = [f"gpu{number}" for number in range(gpus)]
    load = Load("alone", lambda seed, data: Rows(), LOAD)
    with new_policy(policy, load, engine, names) as chosen:
        return Fleet(chosen, {name: served_engine(engine) for name in names}).run(rows)


def figures(outcomes: Sequence[SimOutcome]) -> tuple[float, float, float, float]:
    """Return the p99s of chats and documents, the share in time, and the share rejected."""
    chat = np.array([one.request.input_tokens <= CHAT_MOST for one in outcomes])
    ttft_s = np.array([np.nan if one.ttft_s is None else one.ttft_s for one in outcomes])
    served = ~np.isnan(ttft_s)
    in_time = ttft_s <= np.where(chat, *TARGET_S)
    return (
        quantile(ttft_s[served & chat], 0.99),
        quantile(ttft_s[served & ~chat], 0.99),
        float(in_time.mean()),
        float(1 - served.mean()),
    )


def table(seeds: int) -> Iterator[str]:
    yield "| GPUs | flags | chats' p99 | documents' p99 | documents, ratio | in time | rejected |"
    yield "| --- " * 7 + "|"
    for chunk, flags in ((CHUNK, "the flag"), (0, "default")):
        engine = replace(ENGINE, long_prefill_token_threshold=chunk)
        for gpus in GPUS:
            both = [
                figures([o for seed in range(seeds) for o in play(gpus, engine, policy, seed)])
                for policy in (FOREBAY, "direct")
            ]
            (chat, document, share, rejected), (chat2, document2, share2, _) = both
            yield (
                f"| {gpus} | {flags} | {chat:.2f} s, {chat2:.1f} s "
                f"| {document:.1f} s, {document2:.1f} s | {document / document2:.2f} "
                f"| {share:.1%}, {share2:.1%} | {rejected:.1%} |"
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
