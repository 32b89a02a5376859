"""Summarise a search: the proven load, the knee, the curve, its plot, and the sentence. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.search.bracket import Bracket
from forebay.analysis.search.evidence import CONFIDENCE, Evidence
from forebay.analysis.search.search import MOST_TOLD, LoadSearch, SearchQuestion
from forebay.analysis.statistics.knee import FOLLOWING, last_followed
from forebay.analysis.statistics.units import duration

if TYPE_CHECKING:
    from rich.table import Table

WORDS = {True: "yes", False: "no", None: "unsure"}
TOO_FAR = 20.0
"""Times the highest proven load: a load that fails only there is no upper bound."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """All measurements at one load.

    Attributes:
        met: True or False when decided, None when unsure.
        attainment, low, high: share of good requests, and its interval.
        effective: the number of independent requests that the judged requests are worth.
    """

    rate_per_s: float
    met: bool | None
    attainment: float
    low: float
    high: float
    judged: int
    effective: float
    completed_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    doubt: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer of a search.

    Attributes:
        highest_per_s: the highest load that is proven to meet the targets, or None.
        fails_at_per_s: the lowest load that is proven not to meet them, or None.
        knee_per_s: the last load of which nearly all was completed while it came. None if this
            holds for all loads or for no load.
        points: the curve, by load.
        requests: arrivals of all trials.
        users: sessions at once at the highest load, or None without sessions.
    """

    highest_per_s: float | None
    fails_at_per_s: float | None
    knee_per_s: float | None
    sentence: str
    points: tuple[CurvePoint, ...]
    requests: int
    warnings: tuple[str, ...]
    users: float | None = None

    @property
    def open_ended(self) -> bool:
        """True if the proven and the failing load are too far apart to be an answer."""
        low, high = self.highest_per_s, self.fails_at_per_s
        return low is not None and high is not None and high > TOO_FAR * low

    def as_json(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence,
            "highest_rate_per_s": self.highest_per_s,
            "fails_at_per_s": self.fails_at_per_s,
            "highest_users": self.users,
            "confidence": CONFIDENCE,
            "knee_per_s": self.knee_per_s,
            "knee_rule": FOLLOWING,
            "requests": self.requests,
            "warnings": list(self.warnings),
            "curve": list(self.points),
        }


def result_of(search: LoadSearch, bracket: Bracket | None, slos: Sequence[str]) -> SearchResult:
    """Sum up a search, or without a bracket the loads of a curve."""
    question = search.question
    points = tuple(_point(search, load) for load in sorted(search.trials))
    # The highest load that is proven, and the lowest that fails.
    if bracket is None:
        highest, fails = _ends(points)
    else:
        at = {point.rate_per_s: point for point in points}
        highest, fails = (at.get(question.load(end)) for end in (bracket.low, bracket.high))
    unproven = _unsure(points, highest, fails, question if bracket else None)
    return SearchResult(
        highest_per_s=highest.rate_per_s if highest else None,
        fails_at_per_s=fails.rate_per_s if fails else None,
        knee_per_s=_knee_per_s(points),
        sentence=_sentence(question.wanted, highest, fails, points, slos),
        points=points,
        requests=sum(part.requests for parts in search.trials.values() for part in parts),
        warnings=(*unproven, *_doubts(points, question)),
        users=highest.rate_per_s * question.users if highest and question.users else None,
    )


def _knee_per_s(points: Sequence[CurvePoint]) -> float | None:
    offered = [point.rate_per_s for point in points]
    followed = last_followed(offered, [point.completed_per_s for point in points])
    if followed is None or followed == len(offered) - 1:
        return None  # no higher load was tried
    return offered[followed]


def _ends(points: Sequence[CurvePoint]) -> tuple[CurvePoint | None, CurvePoint | None]:
    """Return the highest proven load below the lowest failing load, and that load."""
    fails = next((point for point in points if point.met is False), None)
    below = points if fails is None else points[: points.index(fails)]
    return next((point for point in reversed(below) if point.met), None), fails


def _point(search: LoadSearch, load: float) -> CurvePoint:
    parts, evidence = search.trials[load], search.evidence(load)
    low, high = evidence.interval(search.question.z)
    doubted = [part for part in parts if part.verdict != "valid"]
    return CurvePoint(
        rate_per_s=load,
        met=search.decided(load),
        attainment=evidence.share,
        low=low,
        high=high,
        judged=evidence.count,
        effective=evidence.effective,
        completed_per_s=sum(part.completed_per_s for part in parts) / len(parts),
        ttft_p50_s=_mean([part.ttft_p50_s for part in parts]),
        ttft_p99_s=_mean([part.ttft_p99_s for part in parts]),
        doubt=f"{doubted[0].verdict}: {doubted[0].reason}" if doubted else "",
    )


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if len(numbers) == len(values) else None


def _sentence(
    least_share: float,
    highest: CurvePoint | None,
    fails: CurvePoint | None,
    points: Sequence[CurvePoint],
    slos: Sequence[str],
) -> str:
    share, sure = f"{least_share * 100:g} %", f"{CONFIDENCE * 100:g} % confidence"
    targets = " and ".join(slos) or "an answer"
    if highest is None:
        tried = f" down to {points[0].rate_per_s:g} requests/s" if points else ""
        return f"No load{tried} is proven to meet {targets} for {share} of requests."
    words = (
        f"At {highest.rate_per_s:g} requests/s, {share} of requests meet {targets} with {sure} "
        f"({highest.attainment:.2%} of {highest.judged:,} judged did)"
    )
    if fails is None:
        return f"{words}; no load up to {points[-1].rate_per_s:g} is proven to fail."
    if fails.rate_per_s > TOO_FAR * highest.rate_per_s:
        return f"{words}; the loads above it are undecided."
    return (
        f"{words}; at {fails.rate_per_s:g} it fails ({fails.attainment:.2%} of {fails.judged:,})."
    )


def _unsure(
    points: Sequence[CurvePoint],
    highest: CurvePoint | None,
    fails: CurvePoint | None,
    question: SearchQuestion | None,
) -> list[str]:
    """Name the loads that a search could not prove, and the cure.

    Without a question, as a curve is there for its figures, only why none of its loads is proven.
    """
    if question is None:
        return _unproven(points) if highest is fails is None else []
    # A trace that is too short proves nothing at a high rate, or leaves the answer wide.
    sentences = []
    unsure = [point for point in points if point.met is None]
    short = next((point for point in unsure if question.too_short(point.rate_per_s)), None)
    wide = (1 + question.resolution) ** 1.5
    if short:
        sentences.append(
            f"from {short.rate_per_s:g}/s on the trace's {len(question.rows):,} requests are "
            f"over in less than {question.least_s:g} s (20 times the longest target), which proves "
            "nothing; make a longer one: forebay traces fit, then synth model"
        )
    elif highest and fails and fails.rate_per_s > highest.rate_per_s * wide:
        sentences.append(
            f"between {highest.rate_per_s:g} and {fails.rate_per_s:g}/s the requests are too few "
            "to decide; give more with --requests or --parts"
        )
        sentences += _undecided(unsure, question)
    if highest is None:
        sentences += _unproven(unsure)
    return sentences


def _doubts(points: Sequence[CurvePoint], question: SearchQuestion) -> list[str]:
    """Name reasons why the figures may not describe the service under this traffic."""
    sentences = []
    if question.copied:
        sentences.append(
            f"the trace's {question.copied:,} requests were repeated with prompts of their own, "
            "which find no document of another copy in a cache: a longer trace of this traffic may "
            f"bear more; give one of {len(question.rows):,} requests"
        )
    return sentences + [
        f"at {point.rate_per_s:g}/s this client, not the server, may be the limit ({point.doubt})"
        for point in points
        if point.doubt and point.met is not True
    ]


def _undecided(unsure: Sequence[CurvePoint], question: SearchQuestion) -> list[str]:
    """Explain why the undecided load with most requests is undecided."""
    if not unsure:
        return []
    point = max(unsure, key=lambda candidate: candidate.judged)
    evidence = Evidence(round(point.attainment * point.judged), point.judged, point.effective)
    needed = evidence.requests_to_decide(question.wanted, question.z)
    more = "no number of them decides" if needed > MOST_TOLD else f"it takes about {needed:,.0f}"
    return [
        f"{point.rate_per_s:g}/s is undecided: {point.attainment:.2%} of {point.judged:,} requests "
        f"met the targets, and {question.wanted * 100:g} % lies within the interval, "
        f"{point.low:.2%} to {point.high:.2%}; the late ones came together, so they count as "
        f"{point.effective:,.0f}; {more}"
    ]


def _unproven(unsure: Sequence[CurvePoint]) -> list[str]:
    """Explain why loads at which no request missed its targets are not proven."""
    all_met = [point for point in unsure if point.attainment == 1]
    if not all_met:
        return []
    best = max(all_met, key=lambda point: point.effective)
    return [
        f"at {best.rate_per_s:g}/s none of {best.judged:,} requests missed, but the slowest came "
        f"together, so that they prove no more than {best.effective:,.0f} on their own would; give "
        "a longer trace, --arrivals poisson, more --parts or --requests"
    ]


def curve_table(result: SearchResult) -> "Table":
    """Make a row for each load, with the interval that decided the load."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("requests/s", "met", "attainment", "interval", "judged", "TTFT p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in result.points:
        table.add_row(
            f"{point.rate_per_s:g}",
            WORDS[point.met],
            f"{point.attainment:.2%}",
            f"{point.low:.2%} - {point.high:.2%}",
            f"{point.judged:,}",
            duration(point.ttft_p50_s),
            duration(point.ttft_p99_s),
        )
    return table


def curve_plot(result: SearchResult, origin: str) -> str:
    """Plot attainment, and TTFT, against the load, and TTFT against throughput.

    Args:
        origin: words that the titles get for a simulated target, else "".
    """
    loads = Axis(f"requests per second offered{origin}", count_label)
    note = None if result.highest_per_s is None else (result.highest_per_s, "highest load")
    met = [(point.rate_per_s, point.attainment) for point in result.points]
    share = Axis("share of requests that met their targets", lambda v: f"{v:.0%}", log=False)
    panels = [Panel([Series("attainment", met, met)], loads, share, note)]
    marks = ("p50", "p99")
    latency = [_latency(result, mark, "rate_per_s") for mark in marks]
    if any(series.points for series in latency):
        panels.append(Panel(latency, loads, Axis("time"), note))
        # The usual curve of a server: to the right more is completed, upwards it takes longer.
        completed = [_latency(result, mark, "completed_per_s") for mark in marks]
        done = {point.rate_per_s: point.completed_per_s for point in result.points}
        knee = None if result.knee_per_s is None else (done[result.knee_per_s], "knee")
        axis = Axis(f"requests per second completed{origin}", count_label)
        panels.append(Panel(completed, axis, Axis("time"), knee))
    return document(*panels)


def _latency(result: SearchResult, mark: str, across: str) -> Series:
    """Return TTFT against the load, or against throughput."""
    times = [(getattr(p, across), getattr(p, f"ttft_{mark}_s")) for p in result.points]
    points = [(load, time_s) for load, time_s in times if time_s]
    return Series(f"TTFT {mark}", points, points)
