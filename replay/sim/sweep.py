"""Simulate every combination of the given values over one trace, on all cores or on Ray.

Each combination starts from equal input, so its result does not depend on where it runs. The bound
on what any scheduler could reach takes longer than many a simulation, and it is the same for all
policies. So of the cases that differ only in the policy, the first computes it. If that
case served all requests in time, the bound is their number for the others, too.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import NOT_SIMULATED
from forebay.replay.plan.slo import Slo
from forebay.replay.sim.capacity import capacity_per_s, mixed_capacity_per_s
from forebay.replay.sim.scenario import (
    Scenario,
    Simulated,
    check_policy,
    parse_pools,
    simulate,
    split_gpus,
)
from forebay.replay.sim.summary import bound_of, set_bound, summarise
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.ground.command_line.garbage import no_collections
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

Value = str | int | float | bool | None
SERVER_ONLY = ("time_scale", "served_model_name", "enable_request_id_headers")
LEFT_OUT = (*SERVER_ONLY, *NOT_SIMULATED)
ENGINE_KEYS = tuple(field.name for field in fields(EngineConfig) if field.name not in LEFT_OUT)
WORKLOAD_KEYS = ("rate", "speed", "load", "seed")
KEYS = tuple(dict.fromkeys(("gpus", "pools", "policy", *WORKLOAD_KEYS, *ENGINE_KEYS)))


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One combination: the values that differ between cases, and the settings they result in."""

    values: Mapping[str, Value]
    scenario: Scenario
    workload: SimWorkload
    slos: tuple[Slo, ...]

    @property
    def traffic(self) -> tuple[tuple[str, Value], ...]:
        """The values that make its requests and engines differ from other cases."""
        return tuple(item for item in self.values.items() if item[0] != "policy")


def parse_axis(text: str) -> tuple[str, list[Value]]:
    """Read `max_num_batched_tokens=2048,8192` (InputError: another form or name)."""
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not equals or not values:
        raise InputError(f"--sweep: {text!r} is not NAME=VALUE,VALUE; e.g. gpus=2,4,8")
    if name not in KEYS:
        raise InputError(f"--sweep: no option {name!r}; there are {', '.join(KEYS)}")
    return name, [_value(name, part.strip()) for part in values.split(",")]


def parse_axes(texts: Sequence[str]) -> dict[str, list[Value]]:
    """Read each `--sweep` under its name (InputError: a wrong one, or a name given twice)."""
    axes: dict[str, list[Value]] = {}
    for text in texts:
        name, values = parse_axis(text)
        if name in axes:
            both = ",".join(str(value) for value in (*axes[name], *values))
            raise InputError(f"--sweep {name}: given twice; write all values once, {name}={both}")
        axes[name] = values
    return axes


def cases(
    axes: Mapping[str, Sequence[Value]],
    base: Scenario,
    workload: SimWorkload,
    slos: tuple[Slo, ...],
) -> Iterator[SweepCase]:
    """Make every combination of the axes, the last varying fastest (InputError: a wrong value)."""
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        engine = {key: value for key, value in values.items() if key in ENGINE_KEYS}
        outer: dict[str, Any] = {key: values[key] for key in ("gpus", "policy") if key in values}
        if isinstance(pools := values.get("pools"), str):
            outer["pools"] = parse_pools(pools)
        if isinstance(gpu := engine.get("gpu"), str):
            engine["gpu"], mix = split_gpus(gpu)
            outer["gpu_mix"] = mix
        paced = {key: value for key, value in values.items() if key in WORKLOAD_KEYS}
        yield SweepCase(
            values,
            replace(base, engine=replace(base.engine, **engine), **outer),  # type: ignore[arg-type]
            replace(workload, **paced),  # type: ignore[arg-type]
            slos,
        )


def run_case(case: SweepCase) -> dict[str, Any]:
    """Simulate one case, and return its summary with the case's values under "case"."""
    return describe(case, *simulate_case(case))


def simulate_case(case: SweepCase) -> tuple[Simulated, float]:
    """Simulate one case, and return the simulation with the seconds that arrivals went on."""
    scenario = case.scenario

    def capacity(rows: Sequence[TraceRequest]) -> float:
        if scenario.gpu_mix:
            return mixed_capacity_per_s(
                rows, [scenario.engine_config(number) for number in range(scenario.gpus)]
            )
        return capacity_per_s(rows, scenario.engine, scenario.gpus)

    with no_collections():
        trace, window_s = case.workload.requests(scenario.engine.context, capacity)
        return simulate(trace, scenario, new_turns=case.workload.waiting(trace)), window_s


def describe(
    case: SweepCase, simulated: Simulated, window_s: float, *, bounded: bool = True
) -> dict[str, Any]:
    """Make the summary of a simulated case, with the bound if `bounded`."""
    summary = summarise(simulated, case.slos, window_s, bounded=bounded)
    return {
        "case": dict(case.values),
        **summary,
        "constants_remarks": case.scenario.constants_remarks(),
        "cpu_s": round(simulated.cpu_s, 3),
    }


def run_all(
    sweep: Sequence[SweepCase], jobs: int | None = None, *, bounded: bool = True
) -> Iterator[dict[str, Any]]:
    """Simulate the cases on `jobs` processes (default: all cores). Summaries are in their order.

    Args:
        bounded: compute the bound, see `summarise`.
    """
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(sweep))
    leads = _leads(sweep, bounded)
    if jobs <= 1:
        yield from _with_bounds(sweep, map(_run, sweep, leads))
        return
    from forebay.replay.parts.pool import process_pool  # one case needs no processes

    with process_pool(jobs) as pool:
        yield from _with_bounds(sweep, pool.map(_run, sweep, leads))


def run_on_ray(
    sweep: Sequence[SweepCase], address: str, *, bounded: bool = True
) -> Iterator[dict[str, Any]]:
    """Simulate the cases on a Ray cluster (InputError: Ray is missing or unreachable)."""
    from forebay.replay.parts.pool import connect

    ray = connect(address)
    try:
        remote = ray.remote(_run)
        # All are submitted at once. Results are small and come back in the order of the cases.
        pending = [
            remote.remote(case, leads)
            for case, leads in zip(sweep, _leads(sweep, bounded), strict=True)
        ]
        yield from _with_bounds(sweep, map(ray.get, pending))
    finally:
        ray.shutdown()


def _leads(sweep: Sequence[SweepCase], bounded: bool) -> list[bool]:
    """Return a flag for each case: True for the first with its requests and engines."""
    if not bounded:
        return [False] * len(sweep)
    traffic = [case.traffic for case in sweep]
    first = {key: number for number, key in reversed(list(enumerate(traffic)))}
    return [first[key] == number for number, key in enumerate(traffic)]


def _run(case: SweepCase, leads: bool) -> tuple[dict[str, Any], int | None]:
    """Simulate one case. Returns its summary without the bound, and the bound if it `leads`."""
    simulated, window_s = simulate_case(case)
    summary = describe(case, simulated, window_s, bounded=False)
    return summary, bound_of(simulated, case.slos) if leads else None


def _with_bounds(
    sweep: Sequence[SweepCase], results: Iterable[tuple[dict[str, Any], int | None]]
) -> Iterator[dict[str, Any]]:
    """Give each summary the bound that the first case with its requests and engines found."""
    bounds: dict[tuple[tuple[str, Value], ...], int] = {}
    for case, (summary, most) in zip(sweep, results, strict=True):
        if most is not None:
            bounds[case.traffic] = most
        if case.traffic in bounds:
            set_bound(summary, bounds[case.traffic])
        yield summary


def _value(name: str, text: str) -> Value:
    if name == "policy":
        check_policy(text)
        return text
    if name == "pools":
        parse_pools(text)
        return text
    kinds = {"gpus": int, "seed": int, "rate": float, "speed": float, "load": float}
    kind = kinds.get(name) or _engine_kind(name)
    if text == "none" and name in ENGINE_KEYS and NoneType in get_args(_engine_hint(name)):
        return None
    if kind is bool:
        if text not in ("true", "false"):
            raise InputError(f"--sweep {name}: {text!r} is neither true nor false")
        return text == "true"
    try:
        value: Value = kind(text)
        return value
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InputError(f"--sweep {name}: {text!r} is not {what}") from None


def _engine_hint(name: str) -> Any:
    return get_type_hints(EngineConfig)[name]


def _engine_kind(name: str) -> type[Any]:
    hint = _engine_hint(name)
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] or [hint]
    return Path if kinds[0] is Path else kinds[0]
