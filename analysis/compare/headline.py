"""Summarise a comparison in sentences. Every claim is computed, and a worse result is called worse.

B is compared with A. The headline counts the TTFT percentile of each bucket and the goodput. A
server that rejects many requests answers the rest fast, so latency alone never decides. Without
goodput, the share of answered requests is used. It ends with the unanswered requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forebay.analysis.compare.compare import Comparison, latency_of
from forebay.analysis.compare.figures import RunFigures
from forebay.analysis.compare.lines import WHOLE_RUN, ComparisonRow, FigureKind, line_of
from forebay.analysis.runs.provenance import setting
from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.intervals import share_ratio_interval
from forebay.analysis.statistics.units import NONE, durations, listed, rates, shares

Mood = Literal["better", "worse", "mixed", "none", "doubtful"]  # doubtful: invalid or unlike runs
LEFT_OUT_SHARE = 0.01  # with more unanswered, the summary adds "of answered requests"
DOUBTS = "Treat with care: "  # in front of the reasons why two runs cannot be compared
APART = "The runs cannot be compared: "
SHOWN_SHARE = 0.001  # a smaller share of unanswered requests is only in the table
# A latency that stands for a bucket, in short and in full.
NAMES = {"ttft": ("TTFT", "time to first token"), "e2e": ("E2E", "end-to-end latency")}
ANSWERED = FigureKind("answered_share", "answered", "share", "higher")


@dataclass(frozen=True, slots=True)
class Headline:
    """A summary in one sentence, and the sentences with the figures."""

    mood: Mood
    summary: str
    points: tuple[str, ...]


def headline(comparison: Comparison) -> Headline:
    """Summarise `comparison`. A run and itself give sentences on this single run."""
    if comparison.a is comparison.b:
        alone = _single(comparison.a)
        return Headline("none", " ".join(alone), tuple(alone))
    judged: list[tuple[str, ComparisonRow]] = []
    points: list[str] = []
    # Latency: one judgement a bucket, where both runs have enough samples.
    for bucket in comparison.buckets:
        line = comparison.headline_line(bucket)
        if line is None:
            points.append(_too_few(comparison, bucket))
            continue
        name, _ = NAMES[line.key.partition("_")[0]]
        judged.append((f"{bucket} {name}{_of_whom(comparison, bucket)}", line))
        points.append(_latency(comparison, bucket, line))
    points += _without_pairs(comparison)
    # Goodput: a server that rejects many requests answers the rest fast.
    goodput = comparison.line(WHOLE_RUN, "goodput")
    if goodput is None or goodput.better is None:
        judged.append(("the share of requests answered", _answered(comparison)))
    else:
        judged.append(("goodput", goodput))
    points += _service(comparison)
    points += comparison.footnotes
    mood, summary = _outcome(comparison, judged)
    if doubts := "; ".join(comparison.doubts):
        mood = "doubtful"
        if comparison.unlike:
            summary = f"{APART}{doubts}. By figures alone: {summary}"
        else:
            summary += f". {DOUBTS}{doubts}"
    return Headline(mood, f"{summary}.", tuple(points))


def _outcome(
    comparison: Comparison, judged: Sequence[tuple[str, ComparisonRow]]
) -> tuple[Mood, str]:
    """Return the mood, and which run is better in what."""
    wins, losses, rest = (
        [what for what, line in judged if line.better in sides]
        for sides in (("b",), ("a",), ("equal", "unclear", None))
    )
    a, b = comparison.a.name, comparison.b.name
    mood: Mood
    if wins and losses:
        mood, text = "mixed", f"{b} is better than {a} in {listed(wins)}, worse in {listed(losses)}"
    elif wins:
        mood, text = "better", f"{b} is better than {a} in {listed(wins)}"
    elif losses:
        mood, text = "worse", f"{b} is worse than {a} in {listed(losses)}"
    else:
        mood, text = "none", f"No clear difference between {b} and {a}"
    if rest and mood != "none":
        text += f"; no clear difference in {listed(rest)}"
    return mood, f"{text}; {_all_answered(comparison)}"


def _with_both(comparison: Comparison, line: ComparisonRow) -> str:
    """Return the figure in both runs, B first."""
    of_a, of_b = line.texts
    return f"{of_b} with {comparison.b.name}, {of_a} with {comparison.a.name}"


def _latency(comparison: Comparison, bucket: str, line: ComparisonRow) -> str:
    latency, _, percentile = line.key.partition("_")
    text = f"{bucket}: {percentile} {NAMES[latency][1]} {_with_both(comparison, line)}"
    if line.ratio is None or line.better is None:
        return f"{text}."
    if line.better == "equal":
        return f"{text}: equal within 5 %{line.factor_limits()}.{line.least_change()}"
    factor = f"{line.factor} {'shorter' if line.ratio > 1 else 'longer'}"
    if line.better == "unclear":
        return f"{text}: {factor}, but not significant{line.factor_limits()}.{line.least_change()}"
    return f"{text}: {factor}{line.factor_limits()}."


def _without_pairs(comparison: Comparison) -> list[str]:
    """Name the needs of a verdict, if intervals include equality for want of paired requests."""
    open_buckets = [
        bucket
        for bucket in comparison.buckets
        if bucket not in comparison.paired
        and (line := comparison.headline_line(bucket)) is not None
        and line.least_change()
    ]
    if not open_buckets:
        return []
    if _sent_the_same(comparison.a.run, comparison.b.run):
        why = (
            "not paired, as under 99 % of the answered requests are in both runs: small changes "
            "stay hidden. Lower the load until both runs answer nearly all"
        )
    else:
        why = (
            "no verdict without pairs, as other requests, or other times, change a p99 by more "
            "than 10 %. Send the same trace with the same seed to both"
        )
    return [f"{listed(open_buckets)}: {why}."]


def _sent_the_same(a: RunData, b: RunData) -> bool:
    """Return True if both runs sent the same requests. Simulated runs record no schedule."""
    of_a, of_b = (setting(run, "schedule sha256") for run in (a, b))
    if of_a is not None and of_a == of_b:
        return True
    ids_a, ids_b = (set(run.words["id"]) for run in (a, b))
    return ids_a == ids_b and "" not in ids_a


def _of_whom(comparison: Comparison, bucket: str) -> str:
    """A reminder, if the percentiles leave out more than a few requests."""
    left_out = any(
        side.unanswered > LEFT_OUT_SHARE * side.intended
        for side in (comparison.a.of[bucket], comparison.b.of[bucket])
    )
    return " (of answered requests)" if left_out else ""


def _too_few(comparison: Comparison, bucket: str) -> str:
    """Say the longest time to the first token, which stands for percentiles of few requests."""
    of_a, of_b = (
        side.latency["ttft"] for side in (comparison.a.of[bucket], comparison.b.of[bucket])
    )
    a, b = comparison.a.name, comparison.b.name
    longest = [
        f"{text} with {name}"
        for name, text in zip((b, a), durations([of_b.max, of_a.max]), strict=True)
        if text != NONE
    ]
    return (
        f"{bucket}: too few answered requests for a percentile ({of_b.count:,} with {b}, "
        f"{of_a.count:,} with {a})."
        + (f" Longest time to first token: {', '.join(longest)}." if longest else "")
    )


def _service(comparison: Comparison) -> list[str]:
    """Sentences on goodput, stalls, hit ratio and unanswered requests, as far as known."""
    points = []
    goodput = _figure(comparison, WHOLE_RUN, "goodput", "Goodput")
    if goodput:
        met = comparison.line(WHOLE_RUN, "attainment")
        if met is not None and None not in (met.a, met.b):
            of_a, of_b = met.texts
            goodput += f"; requests within their latency targets: {of_b} and {of_a}"
        points.append(goodput)
    for bucket in comparison.buckets:
        what = f"{bucket}: longest pause inside an answer"
        points.append(_figure(comparison, bucket, "stall_max", what, "longer", "shorter"))
    points.append(_figure(comparison, WHOLE_RUN, "hit_ratio", "Prefix hit ratio"))
    return [f"{point}." for point in points if point] + _unanswered(comparison)


def _figure(
    comparison: Comparison,
    section: str,
    key: str,
    what: str,
    more: str = "higher",
    less: str = "lower",
) -> str:
    """Return `WHAT 9.4 /s with b, 7.1 /s with a: 1.3× higher`, or "" if it is not known."""
    line = comparison.line(section, key)
    if line is None or None in (line.a, line.b):
        return ""
    text = f"{what} {_with_both(comparison, line)}"
    if line.ratio is None:
        return text
    if line.better == "equal":
        return f"{text}: equal within 5 %"
    if line.interval is not None and line.ratio not in (0.0, float("inf")):
        text += f": {line.factor} {less if line.ratio > 1 else more}"
    return f"{text}, but not significant" if line.better == "unclear" else text


def _unanswered(comparison: Comparison) -> list[str]:
    sides = comparison.a.of[None], comparison.b.of[None]
    if not any(side.intended and side.unanswered / side.intended >= SHOWN_SHARE for side in sides):
        return []
    texts = [
        f"{run.name} rejected {side.rejected:,} and failed {side.failed:,} of {side.intended:,} "
        f"requests ({side.unanswered / max(1, side.intended) * 100:.1f} %)"
        for run, side in zip((comparison.b, comparison.a), reversed(sides), strict=True)
    ]
    return [f"{'; '.join(texts)}. Latencies are of answered requests only."]


def _all_answered(comparison: Comparison) -> str:
    """Say for each run how many requests it rejected or failed."""
    sides = comparison.a.of[None], comparison.b.of[None]
    if not all(side.run.info.get("joint", True) for side in (comparison.a, comparison.b)):
        return "histograms do not say how many requests were answered"
    if not any(side.unanswered for side in sides):
        return "both answered every request"
    a, b = (
        f"left {side.unanswered:,} of {side.intended:,}" if side.unanswered else "left none"
        for side in sides
    )
    return f"{comparison.b.name} {b} unanswered, {comparison.a.name} {a}"


def _answered(comparison: Comparison) -> ComparisonRow:
    of_a, of_b = comparison.a.of[None], comparison.b.of[None]
    a, b = (side.answered / side.intended if side.intended else None for side in (of_a, of_b))
    interval = share_ratio_interval(a, of_a.intended, b, of_b.intended)
    return line_of(WHOLE_RUN, ANSWERED, a, b, interval)


def _single(side: RunFigures) -> list[str]:
    """Sentences on a single run, bucket by bucket."""
    # One sentence a bucket.
    points = []
    for bucket, figures in side.of.items():
        if bucket is None:
            continue
        # A file of histograms knows values, and not how many requests were answered.
        name = latency_of(figures)
        shown = figures.latency[name]
        joint = side.run.info.get("joint", True)
        percentiles = [
            f"{percentile} {durations([value])[0]}"
            for percentile, value in shown.values.items()
            if value is not None
        ]
        longest = f"at most {durations([shown.max])[0]}, of too few requests for a percentile"
        answered = f"{figures.answered:,} of {figures.intended:,} answered"
        points.append(
            f"{bucket}: {NAMES[name][1]} "
            f"{', '.join(percentiles) or (longest if figures.answered else NONE)}; "
            f"{answered if joint else f'{shown.count:,} values'}."
        )
    # One on the whole run.
    whole = side.of[None]
    if whole.goodput_per_s is not None:
        text = f"Goodput {rates([whole.goodput_per_s])[0]}"
        if whole.attainment is not None:
            text += f"; requests within their latency targets: {shares([whole.attainment])[0]}"
        points.append(f"{text}.")
    return points
