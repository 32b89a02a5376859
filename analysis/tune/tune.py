"""Search vLLM's flags in turn, and report the gain of each on one trace.

One flag is changed at a time, all of its values are simulated, and the best value stays. This
repeats until no flag gains anything. Then each changed flag is taken back alone. A flag without an
effect is left out. For the others the loss is their gain.

A setting is better if more requests meet their targets. Settings with equally many are compared by
how near the 95th percentiles are to their limits. Small differences do not count, because a
simulated fleet is as chaotic as a real one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags
from forebay.replay.plan.slo import Slo
from forebay.replay.sim.scenario import Scenario
from forebay.replay.sim.sweep import SweepCase
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.errors import InputError

AXES: dict[str, tuple[int, ...]] = {
    "tensor_parallel_size": (1, 2, 4, 8),
    "max_num_batched_tokens": (1024, 2048, 4096, 8192, 16384),
    "long_prefill_token_threshold": (0, 512, 1024, 2048, 4096),
    "prefill_schedule_interval": (1, 2, 4),
    "max_num_seqs": (32, 64, 128, 256, 512, 1024),
    "api_server_count": (1, 2, 4),
}
"""Values of each flag, in the order in which the flags are tried."""
MOST_ROUNDS = 3
LEAST_SHARE = 0.002
"""Least difference of the share of requests in time that counts."""
LEAST_NEARER = 0.03
"""Least relative difference of the distance to the limits that counts."""

Run = Callable[[Sequence[SweepCase]], Sequence[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class TuneFigures:
    """The figures of one setting on the trace.

    Attributes:
        attainment: share of the requests that met all targets.
        p95_s: the 95th percentile of each target's quantity, in seconds. None: no sample.
        strain: mean of these as shares of their limits.
    """

    attainment: float
    goodput_per_s: float | None
    p95_s: tuple[float | None, ...]
    strain: float

    def beats(self, other: "TuneFigures") -> bool:
        """True if this is better by more than chance."""
        if abs(self.attainment - other.attainment) > LEAST_SHARE:
            return self.attainment > other.attainment
        return self.strain < other.strain * (1 - LEAST_NEARER)


def served(summary: Mapping[str, Any], slos: Sequence[Slo]) -> TuneFigures:
    """Read a summary of the simulator."""
    p95s = [summary[f"{slo.metric}_ms"][slo.bucket or "all"]["p95"] for slo in slos]
    p95_s = tuple(None if ms is None else ms / 1e3 for ms in p95s)
    shares = [s / slo.limit_s for s, slo in zip(p95_s, slos, strict=True) if s is not None]
    strain = sum(shares) / len(shares) if shares else 0.0
    return TuneFigures(summary["attainment"], summary["goodput_per_s"], p95_s, strain)


@dataclass(frozen=True, slots=True)
class Gain:
    """One flag of the result.

    Attributes:
        before: its value at the start.
        without: the result's other flags alone.
    """

    flag: str
    before: int
    value: int
    without: TuneFigures


@dataclass(slots=True)
class Tuned:
    """The result of a search.

    Attributes:
        impossible: values that this model and GPU cannot have, with the reason, by "flag value".
        simulated: number of simulated settings.
    """

    start: TuneFigures
    best: TuneFigures
    engine: EngineConfig
    servers: int
    gains: list[Gain] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)
    simulated: int = 0


class Tuner:
    """One search. Call `tune` once.

    Args:
        base: the scenario at the start. The number of GPUs stays: more ranks mean fewer servers.
        run: simulates cases and returns their summaries, in their order.
    """

    def __init__(
        self, base: Scenario, workload: SimWorkload, slos: tuple[Slo, ...], run: Run
    ) -> None:
        self._base, self._workload, self._slos, self._run = base, workload, slos, run
        self._gpus = base.gpus * base.engine.tensor_parallel_size
        self._figures: dict[tuple[int, ...], TuneFigures] = {}
        self._impossible: dict[str, str] = {}

    def tune(self) -> Tuned:
        start = now = self._values(self._base.engine)
        self._serve([start])
        for _ in range(MOST_ROUNDS):
            before = now
            for at in range(len(AXES)):
                now = self._best_of(at, now)
            if now == before:
                break
        now, gains = self._without_idle(start, now)
        scenario = self._scenario(now)
        return Tuned(
            self._figures[start], self._figures[now], scenario.engine, scenario.gpus,
            gains, self._impossible, len(self._figures),
        )  # fmt: skip

    def _best_of(self, at: int, now: tuple[int, ...]) -> tuple[int, ...]:
        flag = list(AXES)[at]
        tried = [(*now[:at], value, *now[at + 1 :]) for value in AXES[flag]]
        possible = [
            values
            for values in tried
            if values != now and self._is_possible(flag, values[at], values)
        ]
        self._serve(possible)
        best = now
        for values in possible:
            if self._figures[values].beats(self._figures[best]):
                best = values
        return best

    def _without_idle(
        self, start: tuple[int, ...], now: tuple[int, ...]
    ) -> tuple[tuple[int, ...], list[Gain]]:
        """Take each changed flag back alone. Returns the values without flags of no effect."""
        while True:
            changed = [at for at in range(len(AXES)) if now[at] != start[at]]
            back = {at: (*now[:at], start[at], *now[at + 1 :]) for at in changed}
            back = {
                at: values
                for at, values in back.items()
                if self._is_possible(list(AXES)[at], start[at], values)
            }
            self._serve(list(back.values()))
            idle = [at for at in back if not self._figures[now].beats(self._figures[back[at]])]
            if not idle:
                names = list(AXES)
                return now, [
                    Gain(names[at], start[at], now[at], self._figures[values])
                    for at, values in back.items()
                ]
            now = back[idle[0]]

    def _values(self, engine: EngineConfig) -> tuple[int, ...]:
        in_effect = {"max_num_batched_tokens": engine.batched_tokens, "max_num_seqs": engine.seqs}
        return tuple(in_effect.get(flag) or getattr(engine, flag) for flag in AXES)

    def _scenario(self, values: Sequence[int]) -> Scenario:
        """Return the scenario with these values. Raises InputError if it is impossible."""
        flags = dict(zip(AXES, values, strict=True))
        ranks = flags["tensor_parallel_size"]
        if self._gpus % ranks:
            raise InputError(f"--gpus {self._gpus}: not a multiple of {ranks}")
        defaults = self._values(self._base.engine)
        changed = {
            flag: value
            for (flag, value), default in zip(flags.items(), defaults, strict=True)
            if value != default
        }
        engine = replace(self._base.engine, **changed)  # type: ignore[arg-type]
        return replace(self._base, engine=engine, gpus=self._gpus // ranks)

    def _is_possible(self, flag: str, value: int, values: Sequence[int]) -> bool:
        try:
            self._scenario(values)
        except InputError as error:
            self._impossible[f"{flag} {value}"] = str(error)
            return False
        return True

    def _serve(self, settings: Sequence[tuple[int, ...]]) -> None:
        new = [values for values in dict.fromkeys(settings) if values not in self._figures]
        cases = [
            SweepCase({}, self._scenario(values), self._workload, self._slos) for values in new
        ]
        for values, summary in zip(new, self._run(cases) if cases else (), strict=True):
            self._figures[values] = served(summary, self._slos)


def serve_words(engine: EngineConfig) -> Iterator[str]:
    """Yield the words of the `vllm serve` command: the model, and each flag that is not default."""
    plain = {option.name: option.default for option in fields(EngineConfig)}
    yield from ("vllm", "serve", engine.model_name)
    for flag in fields(EngineFlags):
        value, word = getattr(engine, flag.name, None), flag.name.replace("_", "-")
        if (
            flag.name in ("vllm_version", "acceptance")
            or value is None
            or value == plain[flag.name]
        ):
            continue
        if isinstance(value, bool):
            yield f"--{word}" if value else f"--no-{word}"
        else:
            yield from (f"--{word}", str(value))
