"""Summarise a comparison in sentences. Every claim is computed, and a worse result is called worse.

B is compared with A. The headline counts the TTFT percentile of each bucket and the goodput. A
server that rejects many requests answers the rest fast, so latency alone never decides. Without
goodput, the share of answered requests is used. It ends with the unanswered requests.
"""

from dataclasses import dataclass
from typing import Literal

from forebay.analysis.compare.compare import WHOLE_RUN, Better, Comparison, ComparisonRow, line_of
from forebay.analysis.compare.figures import Figures
from forebay.analysis.runs.provenance import RecordedVerdict, differences, footnote, setting
from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.share_intervals import share_ratio_interval
from forebay.analysis.statistics.units import NONE, durations, rates, ratio, shares

Mood = Literal["better", "worse", "mixed", "none", "doubtful"]  # doubtful: invalid or unlike runs
LEFT_OUT_SHARE = 0.01  # with more unanswered, the summary adds "of answered requests"
DOUBTS = "Treat with care: "  # in front of the reasons why two runs cannot be compared
SHOWN_SHARE = 0.001  # a smaller share of unanswered requests is only in the table


@dataclass(frozen=True, slots=True)
class Headline:
    """A summary in one sentence, and the sentences with the figures."""

    mood: Mood
    summary: str
    points: tuple[str, ...]


def headline(comparison: Comparison) -> Headline:
    """Summarise `comparison`."""
    judged: list[tuple[str, Better | None]] = []
    points: list[str] = []
    # Latency: one judgement a bucket, where both runs have enough samples.
    for bucket in comparison.buckets:
        name = comparison.headline_percentile[bucket]
        line = comparison.headline_line(bucket)
        if line is None:
            points.append(_too_few(comparison, bucket))
            continue
        judged.append(
            (
                f"{bucket} {_latency(comparison, bucket)[0]}{_of_whom(comparison, bucket)}",
                _sure(line),
            )
        )
        points.append(_ttft(comparison, bucket, str(name), line))
    points += _without_pairs(comparison)
    # Goodput: a server that rejects many requests answers the rest fast.
    goodput = comparison.line(WHOLE_RUN, "goodput")
    if goodput is None or goodput.better is None:
        goodput = _answered(comparison)
        judged.append(("the share of requests answered", _sure(goodput)))
    else:
        judged.append(("goodput", _sure(goodput)))
    points += _service(comparison)
    # A late client that changed no conclusion is a footnote, not a doubt.
    points += [
        footnote(run)
        for run, judged, doubtful in _judged(comparison)
        if not (judged.valid or doubtful)
    ]
    mood, summary = _sum_up(comparison, judged)
    return Headline(mood, summary, tuple(points))


def _sure(line: ComparisonRow) -> Better | None:
    """The better run. A difference without an interval may be noise."""
    return "unclear" if line.better in ("a", "b") and line.interval is None else line.better


def _sum_up(comparison: Comparison, judged: list[tuple[str, Better | None]]) -> tuple[Mood, str]:
    mood, text = _outcome(comparison, judged)
    if doubts := _doubts(comparison):
        mood, text = "doubtful", f"{text}. {DOUBTS}{'; '.join(doubts)}"
    return mood, text + "."


def _outcome(comparison: Comparison, judged: list[tuple[str, Better | None]]) -> tuple[Mood, str]:
    a, b = comparison.a.name, comparison.b.name
    wins = [what for what, better in judged if better == "b"]
    losses = [what for what, better in judged if better == "a"]
    rest = [what for what, better in judged if better not in ("a", "b")]
    mood: Mood
    if wins and losses:
        mood, text = "mixed", f"{b} is better than {a} in {_and(wins)}, worse in {_and(losses)}"
    elif wins:
        mood, text = "better", f"{b} is better than {a} in {_and(wins)}"
    elif losses:
        mood, text = "worse", f"{b} is worse than {a} in {_and(losses)}"
    else:
        mood, text = "none", f"No clear difference between {b} and {a}"
    if rest and mood != "none":
        text += f"; no clear difference in {_and(rest)}"
    return mood, f"{text}; {_all_answered(comparison)}"


def _doubts(comparison: Comparison) -> list[str]:
    """Reasons why the figures may not describe the servers alone."""
    limited: dict[str, list[str]] = {}
    for run, verdict, doubtful in _judged(comparison):
        if doubtful:
            why = f" ({verdict.cause})" if verdict.cause else ""
            limited.setdefault(verdict.meaning, []).append(f"{run.name}{why}")
    doubts = [f"{meaning} in {_and(runs)}" for meaning, runs in limited.items()]
    if unlike := differences(comparison.a, comparison.b, bool(comparison.slos)):
        doubts.append(f"the runs differ in {_and(unlike)}")
    return doubts


def _judged(comparison: Comparison) -> list[tuple[RunData, RecordedVerdict, bool]]:
    runs = comparison.a, comparison.b
    return list(zip(runs, comparison.verdicts, comparison.doubtful, strict=True))


def _ttft(comparison: Comparison, bucket: str, percentile: str, line: ComparisonRow) -> str:
    a, b = comparison.a.name, comparison.b.name
    of_a, of_b = durations([line.a, line.b])
    text = (
        f"{bucket}: {percentile} {_latency(comparison, bucket)[1]} {of_b} with {b}, {of_a} with {a}"
    )
    between = ""
    if line.interval is not None:
        low, high = line.interval.low, line.interval.high
        if line.ratio is not None and line.ratio < 1:
            low, high = (1 / high if high else float("inf")), (1 / low if low else float("inf"))
        between = f" (95 % interval {ratio(low)} to {ratio(high)})"
    if line.ratio is None or line.better is None:
        return f"{text}."
    if line.better == "equal":
        return f"{text}: equal within 5 %{between}.{_least_change(line)}"
    factor = line.ratio if line.ratio >= 1 else 1 / line.ratio
    word = "shorter" if line.ratio >= 1 else "longer"
    if line.better == "unclear":
        return f"{text}: {ratio(factor)} {word}, but not significant{between}.{_least_change(line)}"
    return f"{text}: {ratio(factor)} {word}{between}."


def _least_change(line: ComparisonRow) -> str:
    """Name the least change that these runs show, if their interval holds equality."""
    if line.interval is None or line.ratio is None or line.interval.clear:
        return ""
    least = line.interval.least_change(line.ratio)
    if least == float("inf"):
        return " Runs as short as these show no change."
    return f" These runs show a change of {100.0 * least:.0f} % or more."


def _without_pairs(comparison: Comparison) -> list[str]:
    """Name the needs of a verdict, if intervals include equality for want of paired requests."""
    open_buckets = [
        bucket
        for bucket in comparison.buckets
        if bucket not in comparison.paired
        and (line := comparison.headline_line(bucket)) is not None
        and not (line.interval is None or line.interval.clear)
    ]
    if not open_buckets:
        return []
    of_a, of_b = (setting(run, "schedule sha256") for run in (comparison.a, comparison.b))
    if of_a is not None and of_a == of_b:
        why = (
            "not paired, as under 99 % of the answered requests are in both runs: small changes "
            "stay hidden. Lower the load until both runs answer nearly all"
        )
    else:
        why = (
            "no verdict without pairs, as other requests, or other times, change a p99 by more "
            "than 10 %. Send the same trace with the same seed to both"
        )
    return [f"{_and(open_buckets)}: {why}."]


def _latency(comparison: Comparison, bucket: str) -> tuple[str, str]:
    """Name the latency that stands for a bucket, in short and in full."""
    if comparison.headline_latency[bucket] == "ttft":
        return "TTFT", "time to first token"
    return "E2E", "end-to-end latency"


def _of_whom(comparison: Comparison, bucket: str) -> str:
    """A reminder, if the percentiles leave out more than a few requests."""
    left_out = any(
        side.intended - side.answered > LEFT_OUT_SHARE * side.intended
        for side in comparison.figures[bucket]
    )
    return " (of answered requests)" if left_out else ""


def _too_few(comparison: Comparison, bucket: str) -> str:
    of_a, of_b = (side.latency["ttft"].count for side in comparison.figures[bucket])
    return (
        f"{bucket}: too few answered requests for a percentile ({of_b:,} with "
        f"{comparison.b.name}, {of_a:,} with {comparison.a.name}).{_longest(comparison, bucket)}"
    )


def _longest(comparison: Comparison, bucket: str) -> str:
    """Say the longest time to the first token, which stands for percentiles of few requests."""
    of_a, of_b = (side.latency["ttft"].max for side in comparison.figures[bucket])
    shown = [
        f"{longest} with {run.name}"
        for run, longest in zip((comparison.b, comparison.a), durations([of_b, of_a]), strict=True)
        if longest != NONE
    ]
    return f" Longest time to first token: {', '.join(shown)}." if shown else ""


def _service(comparison: Comparison) -> list[str]:
    """Sentences on goodput, stalls, hit ratio and unanswered requests, as far as known."""
    a, b = comparison.a.name, comparison.b.name
    points = []
    if (line := comparison.line(WHOLE_RUN, "goodput")) and None not in (line.a, line.b):
        of_a, of_b = rates([line.a, line.b])
        text = f"Goodput {of_b} with {b}, {of_a} with {a}{_change(line, 'higher', 'lower')}"
        met = comparison.line(WHOLE_RUN, "attainment")
        if met is not None and None not in (met.a, met.b):
            of_a, of_b = shares([met.a, met.b])
            text += f"; requests within their latency targets: {of_b} and {of_a}"
        points.append(f"{text}.")
    for bucket in comparison.buckets:
        line = comparison.line(bucket, "stall_max")
        if line is not None and None not in (line.a, line.b):
            of_a, of_b = durations([line.a, line.b])
            points.append(
                f"{bucket}: longest pause inside an answer {of_b} with {b}, {of_a} with {a}"
                f"{_change(line, 'longer', 'shorter')}."
            )
    if (line := comparison.line(WHOLE_RUN, "hit_ratio")) and None not in (line.a, line.b):
        of_a, of_b = shares([line.a, line.b])
        points.append(
            f"Prefix hit ratio {of_b} with {b}, {of_a} with {a}{_change(line, 'higher', 'lower')}."
        )
    points += _unanswered(comparison)
    return points


def _change(line: ComparisonRow, more: str, less: str) -> str:
    """`: 1.9× higher` or `: equal within 5 %`."""
    if line.better == "equal" or line.ratio is None:
        return "" if line.ratio is None else ": equal within 5 %"
    noise = ", but not significant" if line.better == "unclear" else ""
    if line.ratio == 0 or line.ratio == float("inf"):
        return noise
    return f": {ratio(max(line.ratio, 1 / line.ratio))} {less if line.ratio > 1 else more}{noise}"


def _unanswered(comparison: Comparison) -> list[str]:
    figures = comparison.figures[None]
    missed = [side.intended - side.answered for side in figures]
    if not any(
        side.intended and part / side.intended >= SHOWN_SHARE
        for side, part in zip(figures, missed, strict=True)
    ):
        return []
    texts = [
        f"{run.name} rejected {side.rejected:,} and failed {side.failed:,} of {side.intended:,} "
        f"requests ({part / side.intended * 100 if side.intended else 0:.1f} %)"
        for run, side, part in zip(
            (comparison.b, comparison.a), reversed(figures), reversed(missed), strict=True
        )
    ]
    return [f"{'; '.join(texts)}. Latencies are of answered requests only."]


def _all_answered(comparison: Comparison) -> str:
    """Say for each run how many requests it rejected or failed."""
    figures = comparison.figures[None]
    missed = [side.intended - side.answered for side in figures]
    if not any(missed):
        return "both answered every request"
    b, a = (
        f"{run.name} {f'left {part:,} of {side.intended:,}' if part else 'left none'} unanswered"
        for run, side, part in zip(
            (comparison.b, comparison.a), reversed(figures), reversed(missed), strict=True
        )
    )
    return f"{b}, {a.removesuffix(' unanswered')}"


def _answered(comparison: Comparison) -> ComparisonRow:
    of_a, of_b = comparison.figures[None]
    a, b = (side.answered / side.intended if side.intended else None for side in (of_a, of_b))
    interval = share_ratio_interval(a, of_a.intended, b, of_b.intended)
    return line_of(WHOLE_RUN, "answered_share", "answered", "share", a, b, "higher", interval)


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def single(of: dict[str | None, Figures]) -> list[str]:
    """Sentences on a single run, bucket by bucket."""
    points = []
    for bucket, figures in of.items():
        if bucket is None:
            continue
        percentiles = [
            f"{percentile} {durations([value])[0]}"
            for percentile, value in figures.latency["ttft"].values.items()
            if value is not None
        ]
        longest = durations([figures.latency["ttft"].max])[0]
        ttft = ", ".join(percentiles) or (
            f"at most {longest}, of too few requests for a percentile" if figures.answered else NONE
        )
        points.append(
            f"{bucket}: time to first token {ttft}; {figures.answered:,} of "
            f"{figures.intended:,} answered."
        )
    whole = of[None]
    if whole.goodput_per_s is not None:
        text = f"Goodput {rates([whole.goodput_per_s])[0]}"
        if whole.attainment is not None:
            text += f"; requests within their latency targets: {shares([whole.attainment])[0]}"
        points.append(f"{text}.")
    return points
