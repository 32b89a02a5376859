"""A way by URL: replay the load as `forebay replay` does, and keep the run folders.

Each run has a verdict, which shows a load that this client could not send in time. Every number
can be traced to single requests under OUT/runs.
"""

from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

from forebay.analysis.experiments.gauges import Pool, look, watching
from forebay.analysis.experiments.result import RUNS
from forebay.analysis.experiments.study import Study
from forebay.analysis.experiments.systems import PlayedLoad, Way
from forebay.analysis.experiments.target import About, ask_about
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
from forebay.traces.ground.schema import TraceRequest

MOST_LAG_S = 0.1  # with more lag of a simulated engine, the figures measure this machine


class HttpWay(Way):
    """One or several OpenAI servers in round robin. Gauges are read from `engines`.

    Every `play` and `closed` uses a new salt, so that no cache has seen its prompts.
    """

    def __init__(
        self,
        name: str,
        options: Study,
        addresses: Sequence[Address],
        engines: Sequence[Address],
        about: About,
        pools: Sequence[Pool],
    ) -> None:
        super().__init__(name, about, pools)
        self._study, self._addresses, self._engines = options, addresses, engines

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
        study = self._study
        folder = study.out / RUNS / f"{self.name} {label}".replace(" ", "-").replace("/", "_")
        options = ReplayOptions(
            trace=rows,
            targets=[address.base for address in self._addresses],
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
        async with watching(self._engines, Clock(study.time_scale)) as samples:
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
    options: Study, named: Sequence[tuple[str, Sequence[str]]], engine_urls: Sequence[str]
) -> list[HttpWay]:
    """One way for each (name, URLs). Raises InputError if a URL does not serve the model.

    Args:
        engine_urls: servers whose /metrics are read. Without any, the ways' own URLs.
    """
    ways = []
    clock = Clock(options.time_scale)
    async with Client(
        clock, first_token_timeout_s=60.0, stall_timeout_s=60.0, api_key=options.api_key
    ) as client:
        for name, urls in named:
            addresses, _, about = await ask_about(client, urls, options.model, options.gpu)
            engines = parse_targets(engine_urls) if engine_urls else addresses
            looks = [await look(client.session, engine) for engine in engines]
            pools = [pool for _, pool in looks if pool is not None]
            ways.append(HttpWay(name, options, addresses, engines, about, pools))
    return ways
