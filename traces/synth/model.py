"""Define the model that `forebay traces fit` makes of a trace, and its file.

The model has no text and no names. Sessions are of two kinds:

- Short sessions: a profile of the rate of their starts, the CV of the gaps, and samples of turns.
- Long-lived sessions, such as users, which last a twentieth of the trace or more: the start, the
  duration and the number of turns of each. A rate of starts does not describe them: most began
  before the recording, and go on after its end.

A request without a session is a short session of one turn.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

import orjson

from forebay.traces.ground.errors import InputError, reading

VERSION: Final = 2


class FirstTurn(NamedTuple):
    """A sample of the first turn of a session.

    Lengths and sharing are joint, so that long prompts keep their own answers and their own hits.

    Attributes:
        hits: leading blocks that earlier prompts had.
        ago: number of prompts since the last of these blocks was used.
        turns: turns of the session.
        start_s, span_s: seconds from the start of the trace, and to the last turn. 0 if the
            session is short.
    """

    input_tokens: int
    output_tokens: int
    hits: int
    ago: int
    turns: int
    start_s: float = 0.0
    span_s: float = 0.0


class LaterTurn(NamedTuple):
    """A sample of a later turn.

    Attributes:
        before_tokens: length of the prompt before.
        share: share of that prompt that it keeps.
        new_tokens: tokens after the kept part.
        gap_s: seconds since the turn before, in a long-lived session as if the rate were even.
        think_s: seconds since the answer of the turn before, or -1.
        hits, ago: as for a first turn, if others share more of the prompt than the turn before.
        follows: 1 if the turn names the turn before as its parent.
    """

    before_tokens: int
    share: float
    new_tokens: int
    output_tokens: int
    gap_s: float
    think_s: float
    hits: int
    ago: int
    follows: int


@dataclass(slots=True)
class TrafficModel:
    """The result of `fit`.

    Attributes:
        requests, hit_ratio, mean_input_tokens, mean_output_tokens: figures of the fitted trace.
        root_blocks: leading blocks that all prompts share.
        window_s, profile: starts of short sessions a second in equal windows of the whole trace.
        session_cv: CV of the gaps between those starts, in units of the expected gap.
        first, later: turns of short sessions.
        long_sessions: number of long-lived sessions in the trace.
        long_profile: their later turns in equal windows of the trace, to any scale.
        long_first, long_later: turns of long-lived sessions.
    """

    block_tokens: int
    root_blocks: int
    window_s: float
    profile: list[float]
    session_cv: float
    first: list[FirstTurn]
    later: list[LaterTurn]
    long_sessions: int
    long_profile: list[float]
    long_first: list[FirstTurn]
    long_later: list[LaterTurn]
    requests: int
    hit_ratio: float
    mean_input_tokens: float
    mean_output_tokens: float
    version: int = VERSION

    @property
    def duration_s(self) -> float:
        return self.window_s * len(self.profile)


class CumulativeRate:
    """The expected count of events up to a time, for a profile of rates in equal windows."""

    def __init__(self, rates: Sequence[float], window_s: float) -> None:
        self._rates = rates
        self._window_s = window_s
        self._sums = [0.0, *accumulate(rate * window_s for rate in rates)]

    def count(self, time_s: float) -> float:
        """Return the count at `time_s`, a time inside the profile."""
        window = min(len(self._rates) - 1, int(time_s / self._window_s))
        return self._sums[window] + (time_s - window * self._window_s) * self._rates[window]

    def time(self, count: float) -> float:
        """Return the last time when the count is `count`."""
        window = min(len(self._rates), bisect_right(self._sums, count)) - 1
        rate = self._rates[window]
        inside_s = min(self._window_s, (count - self._sums[window]) / rate) if rate else 0.0
        return window * self._window_s + inside_s


def write_model(model: TrafficModel) -> bytes:
    # orjson writes tuples, but not their subclasses.
    return orjson.dumps(asdict(model), default=tuple, option=orjson.OPT_APPEND_NEWLINE)


def read_model(path: str | Path) -> TrafficModel:
    """Read a model (InputError: not a model)."""
    try:
        with reading(path):
            values = orjson.loads(Path(path).read_bytes())
        model = TrafficModel(**values)
        model.first = _turns(FirstTurn, model.first)
        model.later = _turns(LaterTurn, model.later)
        model.long_first = _turns(FirstTurn, model.long_first)
        model.long_later = _turns(LaterTurn, model.long_later)
        _check(model)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: not a model of traces fit ({error}); make one with forebay traces fit"
        ) from error
    return model


def _turns(kind: Any, rows: Sequence[Any]) -> list[Any]:
    """Make turns of lists of values, each of the type of its field."""
    types = get_type_hints(kind).values()
    return [kind(*(of(value) for of, value in zip(types, row, strict=True))) for row in rows]


def _check(model: TrafficModel) -> None:
    """Raise ValueError if the model cannot make a trace."""
    if model.version != VERSION:
        raise ValueError(f"version {model.version}")
    if not (model.first and any(rate > 0 for rate in model.profile)) and not model.long_first:
        raise ValueError("no samples")
    if not model.duration_s > 0:
        raise ValueError("no duration")
    many = any(turn.turns > 1 for turn in (*model.first, *model.long_first))
    if many and not (model.later or model.long_later):
        raise ValueError("no samples of later turns")
