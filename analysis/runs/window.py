"""Cut a run to a part of its time: `--since 24h` and `--between START..END`.

Figures of each request are cut exactly. Percentiles of single tokens are not known for a part, so
they are left out.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from forebay.analysis.runs.run import RunData
from forebay.traces.ground.command_line.quantities import seconds
from forebay.traces.ground.errors import InputError

OF_TOKENS = ("itl_ms", "icl_ms")
KEPT = ("verdict", "verdict_reason", "slos", "warnings", "ended", "buckets")
FORMS = "give times of the run such as 90s..5m, or dates such as 2026-11-19..2026-11-26T12:00"


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a run: seconds since 1970 (`unix`), since its start, or before its end."""

    value_s: float
    unix: bool = False
    before_end: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a run's time. None: from its start, or to its end. `text` is as typed."""

    start: Moment | None
    end: Moment | None
    text: str


def parse_since(text: str) -> Cut:
    """Read `24h`, which counts back from the end of the run, or a date. Raises InputError."""
    return Cut(_moment(text, "--since", before_end=True), None, f"since {text}")


def parse_between(text: str) -> Cut:
    """Read `START..END`, one of which may be missing. Raises InputError."""
    start, dots, end = (part.strip() for part in text.partition(".."))
    if not dots or not (start or end):
        raise InputError(f"--between {text!r}: {FORMS}")
    of = [_moment(part, "--between") if part else None for part in (start, end)]
    return Cut(of[0], of[1], text)


def _moment(text: str, option: str, *, before_end: bool = False) -> Moment:
    """Read a duration, also in days, or a date. Raises InputError."""
    with suppress(ValueError):
        in_days = text.endswith("d")
        value_s = 86_400 * float(text[:-1]) if in_days else float(seconds(text))
        return Moment(value_s, before_end=before_end)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{option} {text!r}: {FORMS}") from None
    return Moment((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp(), unix=True)


def cut_run(run: RunData, cut: Cut, name: str | None = None) -> RunData:
    """Return the requests that were due in a part of the run's time. Times stay as they are.

    Raises:
        InputError: a date for a run without dates, or no request was due then.
    """
    # Choose the requests by their due time.
    due = run.numbers["intended_s"]
    last_s = float(np.nanmax(due)) if np.isfinite(due).any() else 0.0
    start_s = _at(run, cut.start, last_s, 0.0)
    end_s = _at(run, cut.end, last_s, math.inf)
    inside = (due >= start_s) & (due < end_s)
    if not inside.any():
        raise InputError(
            f"{run.path}: no request was due in {cut.text}; the run has {last_s:,.0f} s"
            f"{_dates(run, last_s)}"
        )
    numbers = {key: values[inside] for key, values in run.numbers.items()}
    words = {key: values[inside] for key, values in run.words.items()}
    # Figures that need single requests are computed again. The others are left out.
    window_s = min(end_s, last_s) - max(0.0, start_s)
    ended = numbers["intended_s"] + np.nan_to_num(numbers["e2e_response_s"])
    summary: dict[str, Any] = {key: run.summary[key] for key in KEPT if key in run.summary}
    lacks = [f"{cut.text}: gaps between tokens are not known for a part of a run"]
    has_tokens = any(isinstance(run.summary.get(key), Mapping) for key in OF_TOKENS)
    summary |= {
        "requests": int(inside.sum()),
        "window_s": window_s,
        "duration_s": float(np.nanmax(ended)) - max(0.0, start_s),
        "warnings": [*(summary.get("warnings") or ()), *(lacks if has_tokens else ())],
    }
    info = {**run.info, "cut": cut.text}
    return replace(
        run, name=name or run.name, summary=summary, info=info, numbers=numbers, words=words
    )


def _at(run: RunData, moment: Moment | None, last_s: float, default_s: float) -> float:
    if moment is None:
        return default_s
    if moment.before_end:
        return last_s - moment.value_s
    if not moment.unix:
        return moment.value_s
    started_s = _started_s(run)
    if started_s is None:
        raise InputError(f"{run.path}: does not say when it was; give seconds of the run")
    return moment.value_s - started_s


def _dates(run: RunData, last_s: float) -> str:
    started_s = _started_s(run)
    if started_s is None:
        return ""
    first, last = (datetime.fromtimestamp(at, UTC) for at in (started_s, started_s + last_s))
    return f", from {first:%Y-%m-%dT%H:%M:%S} to {last:%Y-%m-%dT%H:%M:%S} UTC"


def _started_s(run: RunData) -> float | None:
    """Return the start of the run in seconds since 1970, or None if the run does not say."""
    started = run.info.get("started_unix_s")
    return float(started) if isinstance(started, int | float) and started else None
