"""Make the ways that --target, --engine and --gpus name: simulated engines, or servers by URL.

A way by URL replays a load as `forebay replay` does, and keeps the run folders. Each run has a
verdict, which shows a load that this client could not send in time. Every number can be traced to
single requests under OUT/runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from forebay.analysis.experiments.gauges import look, watching
from forebay.analysis.experiments.result import RUNS
from forebay.analysis.experiments.study import Study
from forebay.analysis.experiments.systems import IN_TURN, PROXY, PlayedLoad, SimWay, Way, sim_ways
from forebay.analysis.experiments.target import SIM, ask_about
from forebay.replay.clock.clock import Clock
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.schedule import TRACE_ARRIVALS, Arrivals
from forebay.replay.plan.target import Target as Address
from forebay.replay.plan.target import parse_targets
from forebay.replay.results.folder import TABLE
from forebay.replay.results.row import Row as RequestRow
from forebay.replay.results.verdict import FAILED
from forebay.replay.runner import replay
from forebay.replay.send.http.client import Client
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

TARGET = "target"  # name of the way to a URL without --engine
MOST_LAG_S = 0.1  # with more lag of a simulated engine, the figures measure this machine


@dataclass
class HttpWay(Way):
    """One or several OpenAI servers in round robin. Gauges are read from `engines`.

    Every `play` and `closed` uses a new salt, so that no cache has seen its prompts.
    """

    study: Study
    addresses: Sequence[Address]
    engines: Sequence[Address]

    async def play(self, label: str, *phases: Sequence[TraceRequest]) -> list[PlayedLoad]:
        salt = token_hex(8)
        return [
            await self._replay(f"{label}-{number}", phase, salt, TRACE_ARRIVALS)
            for number, phase in enumerate(phases)
        ]

    async def closed(self, label: str, rows: Sequence[TraceRequest], at_once: int) -> PlayedLoad:
        return await self._replay(label, rows, token_hex(8), Arrivals("closed", at_once))

    async def _replay(
        self, label: str, rows: Sequence[TraceRequest], salt: str, arrivals: Arrivals
    ) -> PlayedLoad:
        # Replay the rows while samples of the engines' metrics are taken.
        study = self.study
        folder = study.out / RUNS / f"{self.name} {label}".replace(" ", "-").replace("/", "_")
        options = ReplayOptions(
            trace=rows,
            targets=[address.base for address in self.addresses],
            out=folder,
            arrivals=arrivals,
            model=study.model,
            time_scale=study.time_scale,
            salt=salt,
            api_key=study.api_key,
            force=True,  # check_out looked for older runs before the study began
            quiet=True,
            warmup=1,
        )
        async with watching(self.engines, Clock(study.time_scale)) as samples:
            summary = await replay(options)
        values = summary.values
        seen = seen_in(folder, rows)
        verdict, reason = values["verdict"], values["verdict_reason"]
        if verdict == FAILED:  # what the servers did with this load, and no fault of the client
            verdict = "valid"
        # A slow client or a slow simulated engine would pass for a slow server.
        lags = sorted(sample.lag_s for sample in samples) or [0.0]
        lag_s = lags[len(lags) * 9 // 10]  # the 90th percentile: short hiccups do not matter
        if verdict == "valid" and lag_s > MOST_LAG_S:
            verdict = "engine-limited"
            reason = f"a simulated engine was {lag_s:.2f} s behind its clock for 10 % of the time"
        return PlayedLoad(seen, samples, verdict, reason).checked(self.name)


def seen_in(folder: Path, rows: Sequence[TraceRequest]) -> list[RequestRow]:
    """Read the requests of a run folder, in the order of `rows`."""
    import pyarrow.parquet

    read: list[dict[str, Any]] = pyarrow.parquet.read_table(str(folder / TABLE)).to_pylist()
    by_id = {record["id"]: RequestRow(**record) for record in read}
    return [by_id[row.id] for row in rows if row.id in by_id]


async def http_ways(
    study: Study, named: Sequence[tuple[str, Sequence[str]]], engine_urls: Sequence[str]
) -> list[HttpWay]:
    """One way for each (name, URLs). Raises InputError if a URL does not serve the model.

    Args:
        engine_urls: servers whose /metrics are read. Without any, the ways' own URLs.
    """
    ways = []
    clock = Clock(study.time_scale)
    async with Client(
        clock, first_token_timeout_s=60.0, stall_timeout_s=60.0, api_key=study.api_key
    ) as client:
        for name, urls in named:
            addresses, _, about = await ask_about(client, urls, study.model, study.gpu)
            engines = parse_targets(engine_urls) if engine_urls else addresses
            looks = [await look(client.session, engine) for engine in engines]
            pools = [pool for _, pool in looks if pool is not None]
            ways.append(HttpWay(name, about, pools, study, addresses, engines))
    return ways


async def one_way(study: Study, **flags: Any) -> Way:
    """One engine, simulated with its gauges recorded, or by URL. Raises InputError.

    Args:
        flags: options of a simulated engine, which replace the given ones.
    """
    if study.target.startswith(SIM):
        scenario = Scenario(study.engine_config(**flags), 1, DIRECT)
        return SimWay(IN_TURN, scenario, study.target, watched=True)
    (way,) = await http_ways(study, [(TARGET, [study.target])], ())
    return way


async def ways_of(
    study: Study,
    engines: Sequence[str] | None,
    gpus: int,
    *,
    watched: bool = False,
) -> Sequence[Way]:
    """The engines without and with the proxy, simulated or by URL. Raises InputError.

    A URL without --engine is a single way, called the target: it may be an engine or a proxy.
    """
    if study.target.startswith(SIM):
        check_no_engines(engines)
        scenario = Scenario(study.engine_config(), gpus)
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
