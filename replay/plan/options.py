"""Define all options of a replay with their defaults, and check them, without I/O."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.replay.plan.schedule import TRACE_ARRIVALS, Arrivals
from forebay.replay.plan.slo import Slo, default_slos
from forebay.traces.buckets import DEFAULT_BUCKETS, LengthBucket
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest

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
        targets: base URLs. Several targets get requests in turn.
        out: folder of the run.
        slos: latency targets. None uses the defaults for these buckets.
        ask_models: ask targets for their models. False accepts `model` unchecked, for routers that
            list it under another name.
        warmup: small unmeasured requests to each target beforehand.
        drain_timeout_s: time after the last arrival in which running answers may end.
        keys: API key of each tenant.
        lengths: "exact": answers have the lengths of the trace. "free": the model ends them.
        turns: "wait": a turn is due after the answers it waits for. "trace": at its time.
        history: later turns have the answers of the trace ("trace") or of the server ("answers").
        keep_answers: write the text of each complete answer to answers.jsonl.
        think_s: time from an answer (or session) to the next request of a closed loop.
        processes: number of sending processes, each with a part of the sessions.
    """

    trace: Path | Sequence[TraceRequest]
    targets: Sequence[str]
    out: Path
    rate_per_s: float | None = None
    arrivals: Arrivals = TRACE_ARRIVALS
    speed: float | None = None
    duration_s: float | None = None
    model: str | None = None
    seed: int = 0
    endpoint: str = "completions"
    time_scale: float = 1.0
    max_in_flight: int = 10_000
    buckets: tuple[LengthBucket, ...] = DEFAULT_BUCKETS
    slos: tuple[Slo, ...] | None = None
    salt: str = ""
    max_model_len: int | None = None
    too_long: str = "error"
    skip_bad: bool = False
    format_name: str | None = None
    force: bool = False
    quiet: bool = False
    ask_models: bool = True
    warmup: int = 0
    api_key: str | None = None
    first_token_timeout_s: float = 600.0
    stall_timeout_s: float = 120.0
    drain_timeout_s: float = 900.0
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    lengths: str = "exact"
    turns: str = "wait"
    history: str = "trace"
    think_s: float = 0.0
    keep_answers: bool = False
    processes: int = 1

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
