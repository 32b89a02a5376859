"""The policies that are compared: Forebay, models of other routers, and two bounds for all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from arena_ablations import WITHOUT, switched_off
from arena_score import Played, limit_s, of_possible
from arena_workloads import ENGINE, ENGINES, Load, proxy_of

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.fleet import Policy
from forebay.replay.sim.routers.models import ROUTER_MODELS
from forebay.replay.sim.routers.possible import most_in_time
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.ground.schema import TraceRequest

FOREBAY = "forebay"
MODELS = {DIRECT: "model of round-robin (nginx, plain)"} | {
    n: what for n, (_, what) in ROUTER_MODELS.items()
}
POSSIBLE = (
    "all that could be in time"  # no router, but a bound for all (replay/sim/routers/possible.py)
)


@contextmanager
def new_policy(
    name: str, load: Load, engine: EngineConfig, names: Sequence[str]
) -> Iterator[Policy]:
    if name in WITHOUT:
        with switched_off(name, engine, names) as policy:
            yield policy
    elif name == FOREBAY:
        yield Scenario(engine=engine, proxy=proxy_of(load)).new_policy(names)
    else:
        yield Scenario(engine=engine, policy=name).new_policy(names)


def possible_of(rows: Sequence[TraceRequest], seed: int) -> Played:
    limits_s = limit_s(np.array([float(row.input_tokens) for row in rows]))
    return of_possible(most_in_time(rows, limits_s.tolist(), ENGINE, ENGINES), rows, seed)
