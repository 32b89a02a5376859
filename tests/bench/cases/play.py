"""Play one case by which another project measures its router, in virtual time.

    python tests/bench/cases/play.py b2b-saas --load 1.5 --policy llm_d --seed 0 [--flag [4096]]
    python tests/bench/cases/play.py all --load .95

A line is a cell. In time: the first token at most 2 s after arrival for prompts of up to 5,000
tokens, at most 15 s for longer ones. A refused request is not in time; a refusal is late if it
comes more than .1 s after arrival. Times are of served requests, in seconds. --flag is
--long-prefill-token-threshold, 2048 if no number follows. PYTHONPATH=OTHER/.typing plays the policy
of another checkout, PYTHONPATH=.compiled the compiled one of this checkout.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

import numpy as np
from case_list import CASES, Case
from case_traces import Pieces, Rows
from numpy.typing import NDArray

import forebay.proxy.core.shaper as policy_source
from forebay.proxy.config.schema import Config
from forebay.replay.sim.capacity import drain_s
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.routers.models import ROUTER_MODELS
from forebay.replay.sim.scenario import DIRECT, Scenario, simulate

FOREBAY = "forebay"
SPLIT = "split"
POLICIES = (FOREBAY, DIRECT, SPLIT, *ROUTER_MODELS)
CHAT_MOST = 5_000  # prompt tokens
TARGET_S = (2.0, 15.0)  # TTFT of chats and of longer prompts
AT_ONCE_S = 0.1  # a later refusal is late
CHUNK = 2_048
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a cell. NaN: no request was served.

    Attributes:
        in_time, own_in_time: % of all requests, by the target of this page and by the vendor's.
        refused, refused_late: % of all requests.
        admitted_late: % of the admitted.
        tokens_per_s: of the answers, from the first arrival to the last answer.
        hits: % of prompt tokens.
    """

    requests: int
    in_time: float
    own_in_time: float
    refused: float
    refused_late: float
    admitted_late: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_ms: float
    e2e_p50_s: float
    e2e_p99_s: float
    tokens_per_s: float
    hits: float

    def line(self) -> str:
        return (
            f"in time {self.in_time:5.1f} own {self.own_in_time:5.1f} "
            f"refused {self.refused:5.2f} (late {self.refused_late:5.2f}) "
            f"adm. late {self.admitted_late:5.2f} "
            f"TTFT {self.ttft_p50_s:5.2f} {self.ttft_p90_s:5.2f} {self.ttft_p99_s:5.2f} "
            f"TPOT {self.tpot_ms:3.0f} E2E {self.e2e_p50_s:5.1f} {self.e2e_p99_s:5.1f} "
            f"tok/s {self.tokens_per_s:6.0f} hits {self.hits:4.1f}"
        )


def quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan


def mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else math.nan


def figures(case: Case, outcomes: Sequence[SimOutcome]) -> Figures:
    def of(value: object) -> float:
        return math.nan if value is None else float(value)  # type: ignore[arg-type]

    rows = [outcome.request for outcome in outcomes]
    arrived_s = np.array([row.arrival_s for row in rows])
    prompt = np.array([float(row.input_tokens) for row in rows])
    answer = np.array([float(row.output_tokens) for row in rows])
    ttft_s = np.array([of(outcome.ttft_s) for outcome in outcomes])
    e2e_s = np.array([of(outcome.finished_s) for outcome in outcomes]) - arrived_s
    cached = np.array([float(outcome.cached_tokens) for outcome in outcomes])
    refused = np.array([outcome.reject is not None for outcome in outcomes])
    after_s = np.array([o.reject.queued_s if o.reject is not None else 0.0 for o in outcomes])
    served = ~np.isnan(e2e_s)
    tpot_s = (e2e_s - ttft_s) / np.maximum(answer - 1, 1)
    in_time = ttft_s <= np.where(prompt <= CHAT_MOST, *TARGET_S)
    own_ttft_s, own_tpot_s = case.own_target
    own = (ttft_s <= own_ttft_s) & (tpot_s <= own_tpot_s)
    span_s = float((e2e_s + arrived_s)[served].max()) if served.any() else math.nan
    return Figures(
        requests=len(rows),
        in_time=100 * float(in_time.mean()),
        own_in_time=100 * float(own.mean()),
        refused=100 * float(refused.mean()),
        refused_late=100 * float((refused & (after_s > AT_ONCE_S)).mean()),
        admitted_late=100 * mean((~in_time[~refused]).astype(float)),
        ttft_p50_s=quantile(ttft_s[served], 0.5),
        ttft_p90_s=quantile(ttft_s[served], 0.9),
        ttft_p99_s=quantile(ttft_s[served], 0.99),
        tpot_ms=1_000 * mean(tpot_s[served]),
        e2e_p50_s=quantile(e2e_s[served], 0.5),
        e2e_p99_s=quantile(e2e_s[served], 0.99),
        tokens_per_s=float(answer[served].sum()) / span_s,
        hits=100 * float(cached[served].sum()) / max(1.0, float(prompt[served].sum())),
    )


def scenario(
    case: Case, policy: str, flag: int, max_wait_s: float | None, scheduler: str | None = None
) -> Scenario:
    engine = replace(case.engine(), long_prefill_token_threshold=flag, scheduler_cls=scheduler)
    if policy != FOREBAY:
        return Scenario(engine=engine, gpus=case.engines, policy=policy)
    proxy = Config()
    if max_wait_s is not None:  # of documents
        buckets = [bucket.model_dump(exclude_unset=True) for bucket in proxy.buckets]
        buckets[-1]["max_wait"] = max_wait_s
        proxy = Config.model_validate({"buckets": buckets})
    return Scenario(engine=engine, gpus=case.engines, proxy=proxy)


def split(case: Case, rows: Rows, flag: int) -> list[SimOutcome]:
    """Play two fleets of least connections: engines for prompts of up to 5,000 tokens, and others.

    Each has engines by its share of the work, at least one.
    """
    fleet = scenario(case, "least_connections", flag, None)
    parts = [
        [row for row in rows if (row.input_tokens <= CHAT_MOST) == short] for short in (True, False)
    ]
    work_s = [
        drain_s(part[:: len(rows) // 400 + 1], fleet.engine) if part else 0.0 for part in parts
    ]
    chats = round(case.engines * work_s[0] / sum(work_s))
    if all(parts):
        chats = min(max(1, chats), case.engines - 1)
    outcomes: list[SimOutcome] = []
    for part, engines in zip(parts, (chats, case.engines - chats), strict=True):
        if part:
            outcomes += simulate(part, replace(fleet, gpus=engines)).outcomes
    return sorted(outcomes, key=lambda outcome: outcome.request.arrival_s)


def play(
    case: Case,
    policy: str,
    pieces: Pieces,
    seed: int,
    *,
    flag: int = 0,
    max_wait_s: float | None = None,
    scheduler: str | None = None,
) -> list[SimOutcome]:
    """Play one cell and return the outcomes in order of arrival."""
    rows = case.make(pieces, seed)
    if policy == SPLIT:
        return split(case, rows, flag)
    fleet = scenario(case, policy, flag, max_wait_s, scheduler)
    if case.waits:
        from forebay.replay.sim.turns import WaitingTurns  # an older checkout does not have it

        return list(simulate(rows, fleet, new_turns=lambda: WaitingTurns(rows)).outcomes)
    return list(simulate(rows, fleet).outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("case", choices=["all", *CASES])
    parser.add_argument("--load", type=float, default=0.95, help="share of the capacity")
    parser.add_argument("--policy", default=FOREBAY, choices=POLICIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--flag", type=int, nargs="?", const=CHUNK, default=0, metavar="TOKENS",
        help=f"long_prefill_token_threshold; without a number {CHUNK}",
    )  # fmt: skip
    parser.add_argument("--scheduler-cls", metavar="CLASS", help="forebay: its scheduler class")
    options = parser.parse_args()
    print(f"policy: {Path(policy_source.__file__).parent}", file=sys.stderr)
    for name in CASES if options.case == "all" else [options.case]:
        case = CASES[name]
        if case.missing:
            print(f"{name}: skipped, there is no {case.needs}", file=sys.stderr)
            continue
        started = time.process_time()
        outcomes = play(
            case, options.policy, [(case.seconds, options.load * case.capacity)], options.seed,
            flag=options.flag, scheduler=options.scheduler_cls,
        )  # fmt: skip
        took_s = time.process_time() - started
        line = figures(case, outcomes).line()
        print(f"{name:12} {options.load:4.2f} {line}  {took_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
