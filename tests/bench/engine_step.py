"""Forebay's scheduler inside vLLM: python tests/bench/engine_step.py --write (virtual time).

Chats beside documents of 120,000 tokens, each asked about five times, at shares of the rate that
the engines complete round robin: vLLM alone and behind Forebay, with its defaults, with
--long-prefill-token-threshold, and with the scheduler class. Models of other routers have the flag.
All seeds count together. With --trace one engine plays a trace as it is.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from arena_policies import FOREBAY, MODELS
from arena_workloads import ENGINE, at_load
from guard import CHAT_MOST, CHUNK, TARGET_S, play_rows
from guard_workloads import beside

from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.ground.schema import TraceRequest

RESULTS = Path(__file__).parent / "results" / "engine-step.json"
UNTIL_S = 200.0  # of each seed's trace, before its arrivals are scaled to the load
RATES = 3.35, 0.165  # chats and documents a second for each GPU
ENGINES = {
    "default": ENGINE,
    "flag": replace(ENGINE, long_prefill_token_threshold=CHUNK),
    "class": replace(ENGINE, scheduler_cls="forebay"),
}
SET_UPS = {
    f"{name}, {flags}": (policy, engine)
    for name, policy in (("alone", "direct"), ("Forebay", FOREBAY))
    for flags, engine in ENGINES.items()
} | {f"{model}, flag": (model, ENGINES["flag"]) for model in MODELS if model != "direct"}


def rows_of(gpus: int, load: float, seed: int) -> list[TraceRequest]:
    chats_per_s, documents_per_s = (rate * gpus for rate in RATES)
    made = beside(5, chats_per_s, documents_per_s)(seed, 1)
    return at_load([row for row in made if row.arrival_s < UNTIL_S], load, (ENGINE,) * gpus)


def figures(outcomes: Sequence[SimOutcome]) -> dict[str, Any]:
    """Latencies in seconds, and shares of all requests."""
    chat = np.array([o.request.input_tokens <= CHAT_MOST for o in outcomes])
    ttft_s = np.array([np.nan if o.ttft_s is None else o.ttft_s for o in outcomes])
    stall_s = np.array([o.served.stall_s if o.served is not None else 0.0 for o in outcomes])
    tokens = sum(o.request.input_tokens for o in outcomes if o.served is not None)
    served = ~np.isnan(ttft_s)
    chats, documents = ttft_s[chat & served], ttft_s[~chat & served]
    return {
        "chats_s": [round(float(np.quantile(chats, q)), 3) for q in (0.5, 0.9, 0.99)],
        "documents_s": [round(float(np.quantile(documents, q)), 2) for q in (0.5, 0.99)],
        "pause_s": [round(float(np.quantile(stall_s, q)), 3) for q in (0.99, 1.0)],
        "in_time": round(float((ttft_s <= np.where(chat, *TARGET_S)).mean()), 4),
        "documents_in_time": round(float((ttft_s <= TARGET_S[1])[~chat].mean()), 4),
        "rejected": round(float((~served).mean()), 4),
        "hits": round(sum(o.cached_tokens for o in outcomes) / tokens, 3),
    }


def cells(
    gpus: Sequence[int], loads: Sequence[float], seeds: Sequence[int], set_ups: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for count in gpus:
        for load in loads:
            traces = [rows_of(count, load, seed) for seed in seeds]
            for name in set_ups:
                policy, engine = SET_UPS[name]
                outcomes = [o for rows in traces for o in play_rows(rows, policy, engine, count)]
                yield f"{count} GPUs, {load:.0%}, {name}", figures(outcomes)


def alone(rows: list[TraceRequest], set_ups: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in set_ups:
        yield name, figures(play_rows(rows, *SET_UPS[name], 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", default=list(SET_UPS), choices=list(SET_UPS))
    parser.add_argument("--trace", type=Path, help="a trace that one engine plays as it is")
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {RESULTS.name}")
    options = parser.parse_args()
    if options.trace is not None:
        rows = SimWorkload(options.trace).source(ENGINE.context)
        found = alone(rows, options.only)
    else:
        found = cells(options.gpus, options.loads, options.seeds, options.only)
    kept: dict[str, Any] = {}
    for name, row in found:
        kept[name] = row
        print(f"{name:34}", json.dumps(row), flush=True)
    if options.write:
        earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(earlier | kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
