"""Build the ways that --target, --engine and --gpus name."""

from collections.abc import Sequence

from forebay.analysis.experiments.http_system import http_ways
from forebay.analysis.experiments.study import Study
from forebay.analysis.experiments.systems import IN_TURN, PROXY, Way, sim_ways
from forebay.analysis.experiments.target import SIM
from forebay.replay.sim.scenario import Scenario
from forebay.traces.errors import InputError

TARGET = "target"


async def ways_of(
    options: Study,
    engines: Sequence[str] | None,
    gpus: int,
    batched: int | None,
    *,
    watched: bool = False,
) -> Sequence[Way]:
    """The engines without and with the proxy, simulated or by URL. Raises InputError.

    A URL without --engine is a single way, called the target: it may be an engine or a proxy.
    """
    (target,) = options.targets
    if target.startswith(SIM):
        if engines:
            raise InputError("--engine: not with a sim: target, which brings its own engines")
        scenario = Scenario(options.engine(target, batched), gpus)
        return sim_ways(target, scenario, watched=watched)
    if not engines:
        return await http_ways(options, [(TARGET, [target])], ())
    return await http_ways(options, [(IN_TURN, engines), (PROXY, [target])], engines)
