"""The forecast of mode observe for a trace, and the outcome of mode shape, in virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.proxy.config.schema import Config
from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import BackendSpec
from forebay.proxy.core.observe import ObservingShaper
from forebay.proxy.core.policy.routing import least_connections
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet
from forebay.traces.ground.schema import TraceRequest

CHAT_MOST, SLO_S = 5_000, (2.0, 30.0)


def limit_s(prompt: int) -> float:
    """The arena's target of the TTFT of a prompt of `prompt` tokens."""
    return 0.005 + 2.2e-5 * prompt + 0.5e-9 * prompt**2 + SLO_S[prompt > CHAT_MOST]


@dataclass(frozen=True, slots=True)
class Served:
    """Results of one run, one value a request, infinite where it was or would be rejected."""

    ttft_s: list[float]
    in_time: list[bool]

    @property
    def rejected(self) -> float:
        return sum(ttft_s == float("inf") for ttft_s in self.ttft_s) / len(self.ttft_s)

    @property
    def attained(self) -> float:
        return sum(self.in_time) / len(self.in_time)


def served(rows: Sequence[TraceRequest], ttft_s: list[float]) -> Served:
    return Served(
        ttft_s,
        [t <= limit_s(row.input_tokens) for row, t in zip(rows, ttft_s, strict=True)],
    )


def play(
    rows: Sequence[TraceRequest], engine: EngineConfig, *, observe: bool, gpus: int = 2
) -> tuple[Served, Served | None, ObservingShaper]:
    """Play a trace. Return the clients' results, and in mode observe the forecast too."""
    chunk = float(engine.long_prefill_token_threshold or "inf")
    names = [f"gpu{number}" for number in range(gpus)]
    recorder = DecisionRecorder(len(rows))
    shaper = ObservingShaper(
        [BackendSpec(name, min(256, engine.seqs), chunk_tokens=chunk) for name in names],
        Config().core_buckets(),
        recorder=recorder,
        observed=least_connections if observe else None,
    )
    outcomes = Fleet(shaper, {name: served_engine(engine) for name in names}).run(rows)
    seen = served(rows, [float("inf") if o.ttft_s is None else o.ttft_s for o in outcomes])
    if not observe:
        return seen, None, shaper
    shaper.settle(float("inf"))
    forecast = []
    for row in rows:
        would = recorder.receipts.ended[row.id].would
        assert would is not None
        late = would.first_token_at < 0.0
        forecast.append(float("inf") if late else would.first_token_at - would.arrived_at)
    return seen, served(rows, forecast), shaper
