"""The policies that are compared: Forebay, parts of it switched off, models of other routers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from arena_ablations import WITHOUT, switched_off
from arena_workloads import Load, proxy_of

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.fleet import Policy
from forebay.replay.sim.routers.models import ROUTER_MODELS
from forebay.replay.sim.scenario import DIRECT, Scenario

FOREBAY = "forebay"
MODELS = {DIRECT: "model of round-robin (nginx, plain)"} | {
    n: what for n, (_, what) in ROUTER_MODELS.items()
}


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
