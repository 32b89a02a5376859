"""The policies that are compared: Forebay, and models of other routers."""

from collections.abc import Sequence

from arena_workloads import Load, proxy_of

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.fleet import Policy
from forebay.replay.sim.routers.models import ROUTER_MODELS
from forebay.replay.sim.scenario import DIRECT, Scenario

FOREBAY = "forebay"
MODELS = {DIRECT: "model of round-robin (nginx, plain)"} | {
    n: what for n, (_, what) in ROUTER_MODELS.items()
}


def new_policy(name: str, load: Load, engine: EngineConfig, names: Sequence[str]) -> Policy:
    if name == FOREBAY:
        return Scenario(engine=engine, proxy=proxy_of(load)).new_policy(names)
    return Scenario(engine=engine, policy=name).new_policy(names)
