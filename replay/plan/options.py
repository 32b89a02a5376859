"""Define all options of a replay with their defaults, and check them, without I/O."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from forebay.replay.plan.schedule import TRACE_ARRIVALS, Arrivals
from forebay.replay.plan.slo import Slo, default_slos
from forebay.traces.ground.buckets import DEFAULT_BUCKETS, LengthBucket
from forebay.traces.ground.command_line.options import (
    ApiKey,
    AskedModel,
    Duration,
    Endpoint,
    Force,
    FormatName,
    GapSeed,
    SkipBadRows,
    Speed,
    TimeScale,
    TooLong,
    Turns,
    a_time,
)
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LENGTHS = ("exact", "free")
TURNS = ("wait", "trace")
HISTORIES = ("trace", "answers")
MOST_PROCESSES = 256


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of one replay.

    Times are seconds of the run (`time_scale` of them pass in one wall second).

    Attributes:
        trace: a file, or the requests themselves (in order of arrival).
        slos: latency targets. None uses the defaults for these buckets.
        ask_models: ask targets for their models. False accepts `model` unchecked, for routers that
            list it under another name.
        keys: API key of each tenant.
        metrics: URLs of /metrics pages to sample each second into metrics.parquet.
        think_s: time from an answer (or session) to the next request of a closed loop.
        drain_timeout_s: time after the last arrival in which running answers may end.
    """

    trace: Path | Sequence[TraceRequest]
    targets: Sequence[str]
    out: Path
    arrivals: Arrivals = TRACE_ARRIVALS
    buckets: tuple[LengthBucket, ...] = DEFAULT_BUCKETS
    slos: tuple[Slo, ...] | None = None
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    ask_models: bool = True
    rate_per_s: Annotated[
        float | None,
        typer.Option("--rate", help="mean requests a second; changes the gaps, drops no request"),
    ] = None
    speed: Speed = None
    duration_s: Duration = None
    seed: GapSeed = 0
    too_long: TooLong = "error"
    format_name: FormatName = None
    skip_bad: SkipBadRows = False
    model: AskedModel = None
    endpoint: Endpoint = "completions"
    think_s: Annotated[float, a_time("pause between requests of a closed loop", "--think")] = 0.0
    turns: Turns = "wait"
    history: Annotated[
        str, typer.Option(help="history of later turns: trace, or answers (the server's)")
    ] = "trace"
    lengths: Annotated[
        str, typer.Option(help="length of answers: exact (the trace's), or free (the model's)")
    ] = "exact"
    keep_answers: Annotated[
        bool, typer.Option("--keep-answers", help="keep the text of answers in answers.jsonl")
    ] = False
    time_scale: TimeScale = 1.0
    max_in_flight: Annotated[
        int, typer.Option(help="most requests in flight; waits for this limit are measured")
    ] = 10_000
    processes: Annotated[
        int, typer.Option(help="processes that send, each a part of the sessions")
    ] = 1
    ray: Annotated[
        str | None,
        typer.Option(help="address of a Ray cluster, each machine of which runs --processes"),
    ] = None
    metrics: tuple[str, ...] = ()
    salt: Annotated[
        str | None,
        typer.Option(
            help="seed of made prompts; default: a new one, which no cache has seen. An old salt "
            "meets the caches of its last run"
        ),
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(help="context limit in tokens, if lower than the target's own")
    ] = None
    warmup: Annotated[int, typer.Option(help="small unmeasured requests beforehand")] = 0
    first_token_timeout_s: Annotated[
        float, a_time("longest time from sending to the first token", "--first-token-timeout")
    ] = 600.0
    stall_timeout_s: Annotated[float, a_time("longest time without output", "--stall-timeout")] = (
        120.0
    )
    drain_timeout_s: Annotated[
        float, a_time("longest wait after the last arrival", "--drain-timeout")
    ] = 900.0
    api_key: ApiKey = None
    force: Force = False
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress")] = False

    def check(self) -> None:
        """Raise InputError for a value that cannot be used."""
        if self.endpoint not in PATHS:
            raise InputError(f"--endpoint: {self.endpoint!r} is none of {', '.join(PATHS)}")
        for word, words, option in (
            (self.lengths, LENGTHS, "--lengths"),
            (self.turns, TURNS, "--turns"),
            (self.history, HISTORIES, "--history"),
        ):
            if word not in words:
                raise InputError(f"{option}: {word!r} is none of {', '.join(words)}")
        if not 0 <= self.think_s <= 1e6:
            raise InputError(f"--think {self.think_s:g}: give a time of 0 or more")
        if self.think_s and not self.arrivals.closed:
            raise InputError("--think: only a closed loop has it; give --arrivals closed:N")
        for value, option in (
            (self.time_scale, "--time-scale"),
            (self.first_token_timeout_s, "--first-token-timeout"),
            (self.stall_timeout_s, "--stall-timeout"),
            (self.drain_timeout_s, "--drain-timeout"),
        ):
            if not (math.isfinite(value) and 0 < value <= 1e6):
                raise InputError(f"{option}: {value:g} is not a number above 0")
        self._check_counts()

    def _check_counts(self) -> None:
        if self.max_in_flight < 1:
            raise InputError(f"--max-in-flight: {self.max_in_flight} is not 1 or more")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InputError(f"--max-model-len: {self.max_model_len} is not 2 tokens or more")
        most = self.arrivals.closed or self.max_in_flight
        if not 1 <= self.processes <= min(most, MOST_PROCESSES):
            raise InputError(
                f"--processes: {self.processes} is not 1 to {min(most, MOST_PROCESSES)}; each "
                "process needs one request in flight"
            )
        if self.warmup < 0:
            raise InputError(f"--warmup: {self.warmup} is not a number of requests (0 or more)")

    def stated_slos(self) -> tuple[Slo, ...]:
        return default_slos(self.buckets) if self.slos is None else self.slos
