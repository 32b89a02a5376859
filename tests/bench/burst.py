"""Many users ask about one document at once: TTFT and copies, against engines in turn.

    python tests/bench/burst.py

Virtual time, Llama-3-8B on H200: the last phase of `forebay experiment shared-document` ("all at
once", 0.02 s apart) for a grid of users, document lengths, engines and modes. Prints each cell in
which p50 or worst is more than 5 % above that of engines in turn, and what each mode sums up to.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf
from statistics import median
from typing import NamedTuple

from forebay.analysis.experiments.studies.shared_document import requests
from forebay.proxy.config.schema import Config
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet
from forebay.replay.sim.scenario import DIRECT, Scenario

USERS, TOKENS, ENGINES = (10, 20, 50, 200), (20_000, 60_000, 100_000), (1, 2, 4, 8)
MODES = ("default", "flag")
APART_S, PHASE_S, MOST = 0.02, 200.0, 1.05


class Burst(NamedTuple):
    p50_s: float
    worst_s: float
    copies: int


def played(users: int, tokens: int, engines: int, mode: str, policy: str = "") -> Burst:
    rows = [
        replace(row, arrival_s=PHASE_S * phase + APART_S * number)
        for phase, asked in enumerate(requests(users, tokens, 64, 128, 0))
        for number, row in enumerate(asked)
    ]
    engine = EngineConfig(long_prefill_token_threshold=2_048 if mode == "flag" else 0)
    proxy = Config.model_validate({"backends": [{"url": "http://h"}]})
    scenario = Scenario(engine=engine, proxy=proxy)
    if policy:
        scenario = replace(scenario, policy=policy)
    names = [f"gpu{number}" for number in range(engines)]
    fleet = Fleet(scenario.new_policy(names), {name: served_engine(engine) for name in names})
    last = fleet.run(rows)[-users:]
    times = [inf if one.ttft_s is None else one.ttft_s for one in last]
    cold = sum(one.cached_tokens < one.request.input_tokens / 2 for one in last)
    return Burst(median(times), max(times), cold)


def lines(mode: str) -> Iterator[str]:
    beyond = [0, 0]
    most = [0.0, 0.0]
    copies = [0, 0]
    for users, tokens, engines in product(USERS, TOKENS, ENGINES):
        ours = played(users, tokens, engines, mode)
        in_turn = played(users, tokens, engines, mode, DIRECT)
        ratios = ours.p50_s / in_turn.p50_s, ours.worst_s / in_turn.worst_s
        beyond = [count + (r > MOST) for count, r in zip(beyond, ratios, strict=True)]
        most = [max(pair) for pair in zip(most, ratios, strict=True)]
        copies = [copies[0] + ours.copies, copies[1] + in_turn.copies]
        if max(ratios) > MOST or ours.copies > engines:
            yield (
                f"  {users} users, {tokens} tokens, {engines} engines: p50 {ours.p50_s:.3f} and "
                f"worst {ours.worst_s:.3f} s, in turn {in_turn.p50_s:.3f} and "
                f"{in_turn.worst_s:.3f} s; copies {ours.copies}, in turn {in_turn.copies}"
            )
    yield (
        f"{mode}: above {MOST:g} times in turn's: p50 {beyond[0]} cells (at most {most[0]:.2f}), "
        f"worst {beyond[1]} cells (at most {most[1]:.2f}); copies {copies[0]}, in turn {copies[1]}"
    )


if __name__ == "__main__":
    for mode in MODES:
        for line in lines(mode):
            print(line, flush=True)
