"""Search vLLM's flags in turn, and report the gain of each on one trace.

First each value of each flag is tried alone. From the best of these, all values of one flag after
another are tried, and the best stays, until no flag gains anything. Then each changed flag is taken
back alone. The result is the best of all settings tried, since a step that gains something can lead
away from a better single flag. For each flag of the result, the loss without it is its gain.

A setting is better if more requests meet their targets. Settings with equally many are compared by
how near the 95th percentiles are to their limits. Small differences do not count, because a
simulated fleet is as chaotic as a real fleet. A server is given up for requests in time only, not
for percentiles. Among equals the setting with the fewest changed flags wins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags
from forebay.replay.engine.limits import FOREBAY_CLASS
from forebay.replay.plan.slo import Slo
from forebay.replay.sim.scenario import Scenario
from forebay.replay.sim.sweep import SweepCase
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.ground.errors import InputError

FlagValue = int | str | None
CHUNKS = (0, 512, 1024, 2048, 4096)
AXES: dict[str, tuple[FlagValue, ...]] = {
    "tensor_parallel_size": (1, 2, 4, 8),
    "max_num_batched_tokens": (1024, 2048, 4096, 8192, 16384),
    "long_prefill_token_threshold": CHUNKS,
    "prefill_schedule_interval": (1, 2, 4),
    "max_num_seqs": (32, 64, 128, 256, 512, 1024),
    "api_server_count": (1, 2, 4),
    "scheduler_cls": (None, FOREBAY_CLASS),
}
"""Values of each flag, in the order in which the flags are tried."""
MOST_ROUNDS = 3
LEAST_SHARE = 0.002
"""Least difference of the share of requests in time that counts."""
LEAST_NEARER = 0.03
"""Least relative difference of the distance to the limits that counts."""

Values = tuple[FlagValue, ...]
"""A setting: the value of each flag, in the order of `AXES`."""
Run = Callable[[Sequence[SweepCase]], Iterable[dict[str, Any]]]


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


def best_of(
    figures: Mapping[Values, TuneFigures], changes: Mapping[Values, tuple[int, int]]
) -> Values:
    """Return the least change among the settings that are as good as the best, up to chance.

    The share in time of all is compared with the best share. Of the settings that pass and lose the
    fewest servers, the strain is compared with the least strain. In pairs, many small losses would
    add up to a loss that counts.

    Args:
        changes: number of servers lost, and number of flags changed.
    """
    most = max(figures[values].attainment for values in figures)
    level = [v for v in figures if figures[v].attainment >= most - LEAST_SHARE]
    fewest = min(changes[v][0] for v in level)
    level = [v for v in level if changes[v][0] == fewest]
    least = min(figures[v].strain for v in level)
    level = [v for v in level if figures[v].strain * (1 - LEAST_NEARER) <= least]
    return min(level, key=lambda v: (changes[v][1], -figures[v].attainment, figures[v].strain))


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
    before: FlagValue
    value: FlagValue
    without: TuneFigures


@dataclass(slots=True)
class Tuned:
    """The result of a search.

    Attributes:
        servers_before: number of servers at the start, on the same GPUs.
        impossible: values that this model and GPU cannot have, with the reason, by "flag value".
        simulated: number of simulated settings.
    """

    start: TuneFigures
    best: TuneFigures
    engine: EngineConfig
    servers: int
    servers_before: int
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
        self._figures: dict[Values, TuneFigures] = {}
        self._impossible: dict[str, str] = {}

    def tune(self) -> Tuned:
        start = self._values(self._base.engine)
        alone = [values for at in range(len(AXES)) for values in self._changed(at, start)]
        self._serve([start, *alone])
        now = self._best_of(self._figures, start)
        for _ in range(MOST_ROUNDS):
            before = now
            for at in range(len(AXES)):
                tried = [now, *self._changed(at, now)]
                self._serve(tried)
                now = self._best_of(tried, start)
            if now == before:
                break
        now, gains = self._without_idle(start)
        scenario = self._scenario(now)
        return Tuned(
            self._figures[start], self._figures[now], scenario.engine, scenario.gpus,
            self._base.gpus, gains, self._impossible, len(self._figures),
        )  # fmt: skip

    def _changed(self, at: int, now: Values) -> list[Values]:
        """Return the possible settings with another value of one flag."""
        flag = list(AXES)[at]
        axis = AXES[flag]
        if flag == "long_prefill_token_threshold":
            axis = thresholds(self._base.engine)
        others = (value for value in axis if value != now[at])
        tried = [(*now[:at], value, *now[at + 1 :]) for value in others]
        return [values for values in tried if self._is_possible(flag, values[at], values)]

    def _best_of(self, settings: Iterable[Values], start: Values) -> Values:
        figures = {values: self._figures[values] for values in settings}
        changes = {
            values: (
                max(0, self._base.gpus - self._scenario(values).gpus),
                sum(value != old for value, old in zip(values, start, strict=True)),
            )
            for values in figures
        }
        return best_of(figures, changes)

    def _without_idle(self, start: Values) -> tuple[Values, list[Gain]]:
        """Take each changed flag of the best back alone, until that is no better.

        Returns the best of all settings that were tried, and its gains.
        """
        names = list(AXES)
        while True:
            now = self._best_of(self._figures, start)
            changed = [at for at in range(len(AXES)) if now[at] != start[at]]
            tried = {at: (*now[:at], start[at], *now[at + 1 :]) for at in changed}
            back = {n: v for n, v in tried.items() if self._is_possible(names[n], start[n], v)}
            self._serve(list(back.values()))
            if self._best_of(self._figures, start) == now:
                return now, [
                    Gain(names[at], start[at], now[at], self._figures[values])
                    for at, values in back.items()
                ]

    def _values(self, engine: EngineConfig) -> Values:
        in_effect = {"max_num_batched_tokens": engine.batched_tokens, "max_num_seqs": engine.seqs}
        return tuple(in_effect.get(flag) or getattr(engine, flag) for flag in AXES)

    def _scenario(self, values: Values) -> Scenario:
        """Return the scenario with these values. Raises InputError if it is impossible."""
        flags: dict[str, Any] = dict(zip(AXES, values, strict=True))
        ranks = flags["tensor_parallel_size"]
        if self._gpus % ranks:
            raise InputError(f"--gpus {self._gpus}: not a multiple of {ranks}")
        defaults = dict(zip(AXES, self._values(self._base.engine), strict=True))
        changed = {flag: value for flag, value in flags.items() if value != defaults[flag]}
        engine = replace(self._base.engine, **changed)
        return replace(self._base, engine=engine, gpus=self._gpus // ranks)

    def _is_possible(self, flag: str, value: FlagValue, values: Values) -> bool:
        try:
            self._scenario(values)
        except InputError as error:
            self._impossible[f"{flag} {value}"] = str(error)
            return False
        return True

    def _serve(self, settings: Sequence[Values]) -> None:
        new = [values for values in dict.fromkeys(settings) if values not in self._figures]
        cases = [
            SweepCase({}, self._scenario(values), self._workload, self._slos) for values in new
        ]
        for values, summary in zip(new, self._run(cases) if cases else (), strict=True):
            self._figures[values] = served(summary, self._slos)


def thresholds(engine: EngineConfig) -> tuple[FlagValue, ...]:
    """Return the values of --long-prefill-token-threshold, for recurrent states in whole blocks.

    vLLM rounds chunks down to whole blocks there, and blocks have hundreds of tokens.
    """
    layout = engine.kv_budget.layout
    size = layout.block_size if layout.has_states else 1
    return tuple(dict.fromkeys(-(-value // size) * size for value in CHUNKS))


def serve_words(engine: EngineConfig) -> Iterator[str]:
    """Yield the words of the `vllm serve` command: the model, and each flag that is not default."""
    plain = {option.name: option.default for option in fields(EngineConfig)}
    yield from ("vllm", "serve", engine.model_name)
    for flag in fields(EngineFlags):
        value, word = getattr(engine, flag.name, None), flag.name.replace("_", "-")
        if flag.name in ("vllm_version", "acceptance") or value in (None, plain[flag.name]):
            continue
        if isinstance(value, bool):
            yield f"--{word}" if value else f"--no-{word}"
        elif value == FOREBAY_CLASS:
            yield from (f"--{word}", "forebay.proxy.vllm_scheduler.ForebayScheduler")
        else:
            yield from (f"--{word}", str(value))
