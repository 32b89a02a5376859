"""Choose the best set-up, and describe it in a sentence. Pure.

A set-up may win if it needs no more GPUs and is better in a figure that counts: requests in time,
the tails of first tokens, the pauses. It may not be worse in requests in time. If it is worse in
another figure, or has fewer servers, it must bring more requests in time, and the sentence names
the losses. Of these set-ups the most requests in time win, then the most servers, then the shortest
times, then the least change. As every played set-up takes part, the result is never below any.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.analysis.statistics.units import duration, listed
from forebay.analysis.tune.figures import (
    BETTER,
    IN_TIME,
    INSTANT_S,
    PAUSE,
    WORSE,
    OtherwiseRow,
    Repeat,
)

MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer.

    Attributes:
        sentence: names the better set-up, or says that none is better or why there is no advice.
        best: the better set-up, or None.
        more: sentences about a smaller change, and about fewer and more GPUs.
    """

    sentence: str
    best: OtherwiseRow | None = None
    more: tuple[str, ...] = ()


def judge(rows: Sequence[OtherwiseRow], twin: Repeat) -> Verdict:
    """Choose among `rows`, of which the first is the present set-up."""
    if twin.why_not:
        return Verdict(f"No advice: the twin does not repeat what happened. {twin.why_not}")
    present, *others = rows
    able = [row for row in others if _may_win(row, present)]
    if not able:
        sentence = (
            "Keep what you have: no other set-up on these GPUs is better by more than "
            f"{'the twin is off' if twin.lines else 'the twin may be off'} ({twin.error:.0%})."
        )
        return Verdict(sentence, None, tuple(_sizes(rows)))
    best = _least_change(able, present, twin)
    return Verdict(_sentence(best, present), best, tuple([*_level(able, best), *_sizes(rows)]))


def _may_win(row: OtherwiseRow, present: OtherwiseRow) -> bool:
    better, worse = row.those(BETTER), row.those(WORSE)
    counts = _counting(present).intersection(better)
    if row.set_up.gpus > present.set_up.gpus or not counts or IN_TIME in worse:
        return False
    fewer = row.set_up.scenario.gpus < present.set_up.scenario.gpus
    return IN_TIME in better or not (worse or fewer)


def _least_change(
    able: Sequence[OtherwiseRow], present: OtherwiseRow, twin: Repeat
) -> OtherwiseRow:
    """Return the least change among the set-ups that are as good as the best."""
    most = max(_value(row, IN_TIME) for row in able)
    level = [row for row in able if _value(row, IN_TIME) >= most - twin.points]
    servers = max(row.set_up.scenario.gpus for row in level)
    level = [row for row in level if row.set_up.scenario.gpus == servers]
    strain = {row.set_up.name: _strain(row, present) for row in level}
    least = min(strain.values())
    level = [row for row in level if strain[row.set_up.name] <= least + math.log(1 + twin.error)]
    return min(level, key=lambda row: (row.set_up.change, strain[row.set_up.name]))


def _strain(row: OtherwiseRow, present: OtherwiseRow) -> float:
    """Return the mean logarithm of the tails as factors of the present ones."""
    logs = [
        math.log((_value(row, name) + INSTANT_S) / (_value(present, name) + INSTANT_S))
        for name in sorted(_counting(present) - {IN_TIME})
        if row.figures[name].value is not None
    ]
    return sum(logs) / len(logs) if logs else 0.0


def _counting(row: OtherwiseRow) -> set[str]:
    """Return the figures that count. A bucket too small for a tail has its median there."""
    shown = {name for name, figure in row.figures.items() if figure.value is not None}
    medians = {name for name in shown if name.endswith("p50") and f"{name[:-3]}p95" not in shown}
    return {name for name in shown if not name.endswith("p50")} | medians


def _value(row: OtherwiseRow, name: str) -> float:
    return row.figures[name].value or 0.0


def _sentence(best: OtherwiseRow, present: OtherwiseRow) -> str:
    """Return a sentence on the gains and losses of a set-up."""
    words = f"{best.set_up.called} would have been better: "
    words += listed([_change(best, present, key) for key in _named(best.those(BETTER))])
    if worse := _named(best.those(WORSE)):
        words += f"; worse: {listed([_change(best, present, key) for key in worse])}"
    return f"{words}."


def _named(names: Sequence[str]) -> list[str]:
    """Return the figures to name, the most important first, at most one for each bucket."""
    ordered = sorted(names, key=_rank)
    chosen = {name.partition(".ttft")[0]: name for name in reversed(ordered)}
    return [name for name in ordered if name in chosen.values()][:MOST_NAMED]


def _rank(name: str) -> int:
    order = (IN_TIME, "ttft_p99", "ttft_p95", PAUSE, "ttft_p50")
    return order.index(name.rpartition(".")[2])


def _change(row: OtherwiseRow, present: OtherwiseRow, name: str) -> str:
    before, now = (_value(each, name) for each in (present, row))
    if name == IN_TIME:
        return f"{now:.1%} of the requests in time instead of {before:.1%}"
    bucket, _, percentile = name.partition(".ttft_")
    what = f"{bucket} first tokens' {percentile}" if percentile else "the pauses' p99"
    return f"{what} {duration(now)} instead of {duration(before)}"


def _level(able: Sequence[OtherwiseRow], best: OtherwiseRow) -> list[str]:
    """Name the set-ups that change less and gain less, so that the reader may stop there."""
    less = [row for row in able if row.set_up.change < best.set_up.change]
    if not less:
        return []
    good = max(less, key=lambda row: _value(row, IN_TIME))
    in_time = _value(good, IN_TIME)
    return [f"{good.set_up.called}, a smaller change, would have had {in_time:.1%} in time."]


def _sizes(rows: Sequence[OtherwiseRow]) -> list[str]:
    """Return sentences on fewer and more GPUs."""
    present, *others = rows
    words = []
    for row in others:
        if row.set_up.gpus == present.set_up.gpus:
            continue
        better, worse = row.those(BETTER), row.those(WORSE)
        said = f"{row.set_up.called} would have had {_value(row, IN_TIME):.1%} in time"
        if row.set_up.gpus < present.set_up.gpus and worse:
            tails = [_change(row, present, name) for name in _named(worse) if name != IN_TIME]
            said += f"; worse: {listed(tails)}" if tails else ""
        elif not better and not worse and row.refused <= present.refused:
            said += ", and would have been level in all else"
        words.append(f"{said}.")
    return words
