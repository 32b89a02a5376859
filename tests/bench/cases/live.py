"""Play llm-d's b2b-saas in small, live and in virtual time, and compare the two.

    python tests/bench/cases/live.py --load 1.5 [--seed 0] [--time-scale 1] [--block-bytes 320]

Live are two simulated engines, the proxy with its default configuration, and the replayer in this
process, over real sockets. `proxy blocks` is the same in virtual time, with prefixes in the proxy's
blocks; `trace blocks` is as `forebay simulate` plays it, in the trace's blocks of 80 tokens. Both
are means of 16 plays with requests up to 30 ms late, as they come to a busy live server: that alone
moves in time by some points. A line is a side. Exits with 1 if live and `proxy blocks` differ in
time by more than 2 points, with 3 if the machine was too slow: then give a smaller --time-scale.
"""

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

sys.path.extend(str(Path(__file__).parents[2] / part) for part in ("support", "bench"))

import numpy as np
from case_list import CASES, Case
from case_traces import BLOCK, FixedPrompts, Rows
from fakes.kv_models import CONFIGS
from play import AT_ONCE_S, CHAT_MOST, TARGET_S, Floats, quantile
from prefix_blocks import play_in_blocks
from routers.processes import counters
from routers.run import VALID, Signs, judge, late_steps

from forebay.analysis.demo.processes import Engines, engines, proxy_config, server
from forebay.analysis.runs.load import load_run
from forebay.proxy.config.schema import AffinityConfig
from forebay.replay.engine.vllm_versions import NEWEST
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.slo import default_slos
from forebay.replay.results.verdict import lag_limit_s
from forebay.replay.runner import replay
from forebay.replay.send.drain import Stop, run_on_fast_loop
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.text import BYTES_PER_TOKEN

SECONDS, DRAIN_S = 120.0, 300.0  # of arrivals, and after them
MOST_POINTS, PLAYS, LATE_S = 2.0, 16, 0.03
WHOLE = CASES["b2b-saas"]


def row(rows: Rows, *columns: Floats) -> dict[str, float]:
    """Make the figures of a side: % of all requests, seconds of served requests, hits in %.

    Columns are in the order of `rows`, whose prompts are all of one length; NaN: no value.
    """
    prompt = np.array([float(request.input_tokens) for request in rows])
    ttft_s, rejected_s, cached = columns
    served, rejected = ~np.isnan(ttft_s), ~np.isnan(rejected_s)
    shown = {
        "requests": len(rows),
        "failed": float((~served & ~rejected).sum()),
        "in_time": 100 * (ttft_s <= np.where(prompt <= CHAT_MOST, *TARGET_S)).mean(),
        "rejected": 100 * rejected.mean(),
        "rejected_late": 100 * (rejected_s > AT_ONCE_S).mean(),
        "hits": 100 * cached[served].sum() / prompt[served].sum(),
        **{f"ttft_p{p}_s": quantile(ttft_s[served], p / 100) for p in (50, 90, 99)},
    }
    return {name: float(f"{value:.4g}") for name, value in shown.items()}


class Servers(Engines):
    def command(self) -> list[str]:
        size = WHOLE.engine().tensor_parallel_size
        return [*super().command(), "--tensor-parallel-size", str(size)]


def virtual(case: Case, rows: Rows, tokens: int) -> dict[str, float]:
    """Return means of PLAYS plays, and the least and most in time."""
    plays = list[dict[str, float]]()
    for seed in range(PLAYS):
        dice = Random(seed)
        moved = [replace(r, arrival_s=r.arrival_s + dice.uniform(0, LATE_S)) for r in rows]
        outcomes = play_in_blocks(case, sorted(moved, key=lambda r: r.arrival_s), tokens)
        rejected_s = [o.reject and o.reject.queued_s for o in outcomes]
        columns = [o.ttft_s for o in outcomes], rejected_s, [o.cached_tokens for o in outcomes]
        plays.append(row(rows, *(np.array(column, np.float64) for column in columns)))
    in_time = [play["in_time"] for play in plays]
    means = {name: float(f"{np.mean([play[name] for play in plays]):.4g}") for name in plays[0]}
    return means | {"least": min(in_time), "most": max(in_time)}


async def live(
    case: Case, rows: Rows, scale: float, block_bytes: int, folder: Path, stop: Stop
) -> tuple[dict[str, float], str]:
    """Play the requests over sockets. Returns the figures, and why the run is invalid, if it is."""
    engine, slos = case.engine(), default_slos(DEFAULT_BUCKETS)
    model, config = folder / "config.json", folder / "proxy.yaml"
    model.write_text(json.dumps(CONFIGS["Qwen/Qwen3-32B"]), encoding="utf-8")
    fleet = Servers(str(model), str(engine.gpu), case.engines, scale)
    async with AsyncExitStack() as stack:
        urls = await stack.enter_async_context(engines(fleet, folder))
        text = proxy_config(urls, scale) + f"affinity: {{block_bytes: {block_bytes}}}\n"
        config.write_text(text, encoding="utf-8")
        words, log = ["proxy", "--config", str(config)], folder / "proxy.log"
        front = await stack.enter_async_context(server(words, log, len(urls)))
        ports = [int(url.rpartition(":")[2]) for url in urls]
        options = ReplayOptions(
            trace=rows, targets=[front], out=folder / "run", time_scale=scale, slos=slos,
            quiet=True, drain_timeout_s=DRAIN_S,
        )  # fmt: skip
        values = (await replay(options, stop)).values
        counted = [await asyncio.to_thread(counters, port) for port in ports]
    steps = late_steps(counted, lag_limit_s(slos))
    verdict, why = judge(Signs(values["verdict"], values["verdict_reason"], steps, 0.0))
    run = load_run(folder / "run")
    order = np.argsort([int(name) for name in run.words["id"]])
    columns = ("ttft_response_s", "reject_latency_s", "cached_tokens")
    shown = row(rows, *(run.numbers[name][order] for name in columns))
    return shown, "" if verdict == VALID else why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--load", type=float, default=1.5, help="share of the capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--block-bytes", type=int, default=AffinityConfig().block_bytes)
    told = vars(parser.parse_args())
    assert isinstance(WHOLE.make, FixedPrompts)
    case = replace(WHOLE, make=replace(WHOLE.make, heads=38), engines=2)
    rows = case.make([(SECONDS, told["load"] * WHOLE.capacity * 2 / WHOLE.engines)], told["seed"])
    same = virtual(case, rows, told["block_bytes"] // BYTES_PER_TOKEN)
    with TemporaryDirectory() as name:
        found, why = run_on_fast_loop(
            lambda stop: live(case, rows, told["time_scale"], told["block_bytes"], Path(name), stop)
        )
    told |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "vllm": NEWEST, "why_invalid": why}
    sides = {"live": found, "proxy blocks": same, "trace blocks": virtual(case, rows, BLOCK)}
    for side, shown in sides.items():
        print(json.dumps({"side": side, **told, **shown}))
    sys.exit(3 if why else int(abs(found["in_time"] - same["in_time"]) > MOST_POINTS))


if __name__ == "__main__":
    main()
