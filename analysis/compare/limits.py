"""Read conditions such as `chat.ttft_p99 > 5%`, and find the conditions that a comparison meets.

A condition names a figure, a direction and a limit. `%` is a change against the baseline: `> 5%` is
met if the figure grew by more than 5 %, `< -5%` if it fell by more than that. Other limits are
absolute: a time for latencies, a share from 0 to 1, requests a second, or a number of requests.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from forebay.analysis.compare.compare import Comparison
from forebay.analysis.compare.figures import RunFigures
from forebay.analysis.compare.lines import LATENCY_LABELS, THROUGHPUT, Unit, figure_of
from forebay.analysis.statistics.quantiles import SHARES
from forebay.analysis.statistics.units import FORMATS
from forebay.traces.ground.command_line.quantities import seconds
from forebay.traces.ground.errors import InputError

SESSION = "session"  # `session.e2e_p50` counts whole tasks in all buckets
OTHERS: dict[str, Unit] = {
    "attainment": "share",
    "hit_ratio": "share",
    "goodput": "per_s",
    "rejected": "count",
    "failed": "count",
    "answered": "count",
    **{kind.key: kind.unit for kind in THROUGHPUT},
}
GRAMMAR = "write e.g. 'chat.ttft_p99 > 5%', 'document.e2e_p50 > 2s' or 'attainment < 0.99'"
_CONDITION = re.compile(
    r"\s*(?:([^\s.<>]+)\.)?([a-z][a-z_0-9]*(?:\.9)?)\s*([<>])\s*([-+]?[0-9.]+)\s*(%|[a-z]*)\s*"
)


@dataclass(frozen=True, slots=True)
class FailCondition:
    """One condition.

    Attributes:
        bucket: None: all requests.
        change: `value` is a change against the baseline, as a share; otherwise absolute.
    """

    text: str
    bucket: str | None
    figure: str
    sign: str  # > or <
    value: float
    change: bool

    @property
    def name(self) -> str:
        return f"{self.bucket}.{self.figure}" if self.bucket else self.figure

    def met_by(self, value: float) -> bool:
        return value > self.value if self.sign == ">" else value < self.value

    @property
    def unit(self) -> Unit:
        return OTHERS.get(self.figure, "s")


def parse_limit(text: str) -> FailCondition:
    """Read one condition, or raise InputError that gives the right form."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise InputError(f"--fail-if {text!r}: {GRAMMAR}")
    bucket, figure, sign, number, unit = match.groups()
    if bucket in LATENCY_LABELS:  # `ttft.p99` is a slip, not a bucket
        raise InputError(f"--fail-if {text!r}: write {bucket}_{figure}")
    if bucket == SESSION and figure.startswith("e2e_"):
        bucket, figure = None, f"{SESSION}_{figure}"
    names = [f"{SESSION}_e2e_{share}" for share in (*SHARES, "max") if bucket is None]
    names += [f"{name}_{share}" for name in LATENCY_LABELS for share in (*SHARES, "max")]
    if figure not in OTHERS and figure not in names:
        raise InputError(
            f"--fail-if {text!r}: no figure {figure!r}; one of: {', '.join(LATENCY_LABELS)} with "
            f"_p50, _p90, _p95, _p99, _p99.9 or _max; {', '.join(OTHERS)}"
        )
    value = _limit(text, figure, number, unit)
    return FailCondition(text, bucket, figure, sign, value, unit == "%")


def _limit(text: str, figure: str, number: str, unit: str) -> float:
    """Read the limit of a figure in base units, or a change as a share."""
    is_time = figure not in OTHERS
    right = "a time such as 2s or 300ms" if is_time else "a number"
    if is_time and not unit:
        raise InputError(f"--fail-if {text!r}: give the time with its unit, or a change such as 5%")
    try:
        if unit == "%":
            return float(number) / 100
        if unit and not is_time:
            raise ValueError
        value = float(seconds(f"{number.lstrip('+')}{unit}"))
    except ValueError:
        raise InputError(
            f"--fail-if {text!r}: {number}{unit} is no limit; give {right} or a change such as 5%"
        ) from None
    if OTHERS.get(figure) == "share" and not 0.0 <= value <= 1.0:
        raise InputError(f"--fail-if {text!r}: {figure} is a share from 0 to 1, or a change in %")
    return value


def broken(comparisons: Sequence[Comparison], limits: Sequence[FailCondition]) -> list[str]:
    """Return one line for each condition that a run B meets.

    Raises InputError for a bucket that neither run has, and for a figure that was not measured: a
    condition that cannot be judged must not pass. The error has the lines of the others, too.
    """
    lines, errors = [], []
    for comparison, limit in product(comparisons, limits):
        try:
            lines.append(_judge(comparison, limit))
        except InputError as error:
            errors.append(str(error))
    met = [line for line in lines if line is not None]
    if errors:
        raise InputError("; ".join((*met, *errors)))
    return met


def _judge(comparison: Comparison, limit: FailCondition) -> str | None:
    """Return the fault of run B by this condition, or None. Raises InputError."""
    if limit.bucket is not None and limit.bucket not in comparison.buckets:
        raise InputError(
            f"--fail-if {limit.text!r}: no bucket {limit.bucket!r}; one of: "
            f"{', '.join(comparison.buckets)}"
        )
    b = _measured(comparison, comparison.b, limit)
    if not limit.change:
        if not limit.met_by(b):
            return None
        shown, most = FORMATS[limit.unit]([b, limit.value])
        return f"{limit.name} of {comparison.b.name} is {shown} (limit {limit.sign} {most})"
    a = _measured(comparison, comparison.a, limit)
    change = _change(a, b)
    if not limit.met_by(change):
        return None
    shown, before = FORMATS[limit.unit]([b, a])
    percent = "beyond measure" if math.isinf(change) else f"{change * 100:+.1f} %"
    return (
        f"{limit.name} of {comparison.b.name} is {shown}, {percent} against {before} of "
        f"{comparison.a.name} (limit {limit.sign} {limit.value * 100:g} %)"
    )


def _measured(comparison: Comparison, side: RunFigures, limit: FailCondition) -> float:
    value = figure_of(side, limit.bucket, limit.figure)
    if value is not None:
        return value
    why = f"{side.name} has no {limit.name}"
    share = limit.figure.rpartition("_")[2]
    if share in SHARES:
        needed = math.ceil(comparison.min_beyond / (1.0 - SHARES[share]))
        why = (
            f"{side.name} has too few requests for {limit.name} (it needs {needed:,}); give a "
            "lower percentile, a longer run or --min-beyond 0"
        )
    raise InputError(f"--fail-if {limit.text!r}: {why}")


def _change(a: float, b: float) -> float:
    """Return the change from A to B as a share of A."""
    if a == b:
        return 0.0
    return b / a - 1.0 if a and math.isfinite(a) else math.copysign(math.inf, b - a)
