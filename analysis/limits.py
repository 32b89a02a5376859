"""Read conditions such as `chat.ttft_p99 > 5%`, and tell which of them a comparison meets.

A condition names a figure, a direction and a limit. `%` is a change against the baseline: `> 5%` is
met if the figure grew by more than 5 %, `< -5%` if it fell by more than that. Other limits are
absolute: a time for latencies, a share from 0 to 1, requests a second, or a number of requests.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.analysis.compare import Comparison, Unit
from forebay.analysis.figures import Figures
from forebay.analysis.quantiles import SHARES
from forebay.analysis.terminal import FORMATS
from forebay.traces.errors import InputError
from forebay.traces.quantities import seconds

LATENCIES = ("ttft", "ttft_failures", "e2e", "tpot", "itl", "stall", "queue")
OTHERS: dict[str, Unit] = {
    "attainment": "share",
    "hit_ratio": "share",
    "goodput": "per_s",
    "rejected": "count",
    "failed": "count",
    "answered": "count",
}
GRAMMAR = "write e.g. 'chat.ttft_p99 > 5%', 'document.e2e_p50 > 2s' or 'attainment < 0.99'"
_CONDITION = re.compile(
    r"\s*(?:([^\s.<>]+)\.)?([a-z][a-z_0-9]*(?:\.9)?)\s*([<>])\s*([-+]?[0-9.]+)\s*(%|[a-z]*)\s*"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """One condition.

    Attributes:
        bucket: None: all requests.
        change: `value` is a change against the baseline, as a share; otherwise absolute.
    """

    text: str
    bucket: str | None
    figure: str
    above: bool
    value: float
    change: bool

    @property
    def name(self) -> str:
        return f"{self.bucket}.{self.figure}" if self.bucket else self.figure

    @property
    def unit(self) -> Unit:
        return OTHERS.get(self.figure, "s")


def parse_limit(text: str) -> Limit:
    """Read one condition; raises InputError that says what would be right."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise InputError(f"--fail-if {text!r}: {GRAMMAR}")
    bucket, figure, direction, number, unit = found.groups()
    if bucket in LATENCIES:  # `ttft.p99` is a slip, not a bucket
        raise InputError(f"--fail-if {text!r}: write {bucket}_{figure}")
    known = [f"{name}_{share}" for name in LATENCIES for share in (*SHARES, "max")]
    if figure not in OTHERS and figure not in known:
        raise InputError(
            f"--fail-if {text!r}: no figure {figure!r}; one of: {', '.join(LATENCIES)} with _p50, "
            f"_p90, _p99, _p99.9 or _max; {', '.join(OTHERS)}"
        )
    try:
        value = float(number)
        if unit not in ("", "%"):
            if figure in OTHERS:
                raise ValueError
            value = float(seconds(f"{number.lstrip('+')}{unit}"))
    except ValueError:
        right = "a number or a change such as 5%"
        if figure not in OTHERS:
            right = "a time such as 2s or 300ms, or a change such as 5%"
        raise InputError(f"--fail-if {text!r}: {number}{unit} is no limit; give {right}") from None
    if not unit and figure not in OTHERS:
        raise InputError(f"--fail-if {text!r}: give the time with its unit, or a change such as 5%")
    if not unit and OTHERS[figure] == "share" and not 0.0 <= value <= 1.0:
        raise InputError(f"--fail-if {text!r}: {figure} is a share from 0 to 1, or a change in %")
    change = unit == "%"
    return Limit(text, bucket, figure, direction == ">", value / 100 if change else value, change)


def broken(comparison: Comparison, limits: Sequence[Limit]) -> list[str]:
    """Return one line for each condition that run B meets.

    Raises InputError for a bucket that neither run has, and for a figure that was not measured: a
    condition that cannot be judged must not pass.
    """
    return [line for limit in limits if (line := _judge(comparison, limit)) is not None]


def _judge(comparison: Comparison, limit: Limit) -> str | None:
    if limit.bucket is not None and limit.bucket not in comparison.buckets:
        raise InputError(
            f"--fail-if {limit.text!r}: no bucket {limit.bucket!r}; one of: "
            f"{', '.join(comparison.buckets)}"
        )
    a, b = (_value(one, limit.figure) for one in comparison.figures[limit.bucket])
    for run, value in ((comparison.a, a), (comparison.b, b)):
        if value is None and (run is comparison.b or limit.change):
            raise InputError(f"--fail-if {limit.text!r}: {_why_none(comparison, limit, run.name)}")
    assert b is not None
    measured = b
    if limit.change:
        assert a is not None
        measured = _change(a, b)
    if not (measured > limit.value if limit.above else measured < limit.value):
        return None
    shown_b, shown_a = FORMATS[limit.unit]([b, a])
    sign = ">" if limit.above else "<"
    text = f"{limit.name} of {comparison.b.name} is {shown_b}"
    if limit.change:
        percent = "beyond measure" if math.isinf(measured) else f"{measured * 100:+.1f} %"
        against = f"{percent} against {shown_a} of {comparison.a.name}"
        return f"{text}, {against} (limit {sign} {limit.value * 100:g} %)"
    return f"{text} (limit {sign} {FORMATS[limit.unit]([limit.value])[0]})"


def _change(a: float, b: float) -> float:
    """Return the change from A to B as a share of A."""
    if a == b:
        return 0.0
    return b / a - 1.0 if a and math.isfinite(a) else math.copysign(math.inf, b - a)


def _value(figures: Figures, figure: str) -> float | None:
    match figure:
        case "goodput":
            return figures.goodput_per_s
        case "attainment":
            return figures.attainment
        case "hit_ratio":
            return figures.hit_ratio
        case "rejected":
            return figures.rejected
        case "failed":
            return figures.failed
        case "answered":
            return figures.answered
    name, _, share = figure.rpartition("_")
    measured = figures.latency[name]
    return measured.max if share == "max" else measured.values[share]


def _why_none(comparison: Comparison, limit: Limit, run: str) -> str:
    share = limit.figure.rpartition("_")[2]
    if share not in SHARES:
        return f"{run} has no {limit.name}"
    needed = math.ceil(comparison.min_beyond / (1.0 - SHARES[share]))
    return (
        f"{run} has too few requests for {limit.name} (it needs {needed:,}); give a lower "
        "percentile, a longer run or --min-beyond 0"
    )
