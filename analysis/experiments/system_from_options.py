"""Build the ways that --target, --engine and --gpus name."""

from collections.abc import Sequence

from forebay.analysis.experiments.http_system import http_ways
from forebay.analysis.experiments.study import Study
from forebay.analysis.experiments.systems import IN_TURN, PROXY, SimWay, Way, sim_ways
from forebay.analysis.experiments.target import SIM
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.ground.errors import InputError

TARGET = "target"


async def one_way(study: Study, batched: int | None, seats: int | None) -> Way:
    """One engine, simulated with its gauges recorded, or by URL. Raises InputError."""
    if study.target.startswith(SIM):
        scenario = Scenario(study.engine_config(batched, seats), 1, DIRECT)
        return SimWay(IN_TURN, scenario, study.target, watched=True)
    (way,) = await http_ways(study, [(TARGET, [study.target])], ())
    return way


async def ways_of(
    study: Study,
    engines: Sequence[str] | None,
    gpus: int,
    batched: int | None,
    *,
    watched: bool = False,
) -> Sequence[Way]:
    """The engines without and with the proxy, simulated or by URL. Raises InputError.

    A URL without --engine is a single way, called the target: it may be an engine or a proxy.
    """
    if study.target.startswith(SIM):
        check_no_engines(engines)
        scenario = Scenario(study.engine_config(batched), gpus)
        return sim_ways(study.target, scenario, watched=watched)
    if not engines:
        return await http_ways(study, [(TARGET, [study.target])], ())
    return await http_ways(study, [(IN_TURN, engines), (PROXY, [study.target])], engines)


def check_no_engines(engines: Sequence[str] | None) -> None:
    """Raise InputError if a simulated target comes with named engines."""
    if engines:
        raise InputError("--engine: not with a sim: target, which brings its own engines")


def measured_by(ways: Sequence[Way]) -> str:
    """The servers of all ways, as a result names them."""
    return ", ".join(dict.fromkeys(way.about.name for way in ways))
