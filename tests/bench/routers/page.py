"""The results as Markdown: each workload's figures and rejections.

Every number comes from `routers.results`. A router without figures is there with the reason.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from result_lines import markdown_table
from routers.contenders import CONTENDERS
from routers.courses import COURSES
from routers.plan import Record
from routers.results import Entry, Estimate, Group, groups

from forebay.analysis.statistics.quantiles import MIN_BEYOND, samples_beyond
from forebay.analysis.statistics.units import NEVER, NONE

GAP = "\N{NO-BREAK SPACE}"  # a figure stays on one line
HEADS = (
    "router", "seeds", "chats: TTFT p50, p90, p99", "documents: TTFT p50, p90, longest",
    "attained", "hit ratio", "rejected", "failed",
)  # fmt: skip


def generated(records: Sequence[Record]) -> str:
    """Return all tables."""
    parts = []
    for group, entries in groups(records).items():
        parts.append(f"## {_title(group)}\n\n{_circumstances(entries)}\n")
        for workload in _by_place([entry.workload for entry in entries], COURSES):
            of = {entry.router: entry for entry in entries if entry.workload == workload}
            ranked = [of[name] for name in _by_place(list(of), CONTENDERS)]
            rows = [[cell.replace("|", "\\|") for cell in _cells(entry)] for entry in ranked]
            table = markdown_table(HEADS, rows)
            parts.append(f"### {workload}\n\n{_about(ranked)}\n\n{table}\n")
    return "\n".join(parts).strip("\n") if parts else "No results yet."


def seconds(value: float | None) -> str:
    """Return three digits, in `s` or `ms`."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return NEVER
    return f"{value:.3g} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"


def seconds_spread(estimate: Estimate | None) -> str:
    """Return `18 s (14.5–20)`. Units are repeated where they are not the same."""
    if estimate is None:
        return NONE
    text = seconds(estimate.value)
    if estimate.interval is None:
        return text
    low, high = seconds(estimate.interval.low), seconds(estimate.interval.high)
    if low == high:
        return text
    unit = text.partition(" ")[2]
    if unit and all(end.partition(" ")[2] == unit for end in (low, high)):
        low, high = low.partition(" ")[0], high.partition(" ")[0]
    return f"{text} ({low}–{high})"


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return NONE
    text = f"{estimate.value:.3f}"
    if estimate.interval is None:
        return text
    low, high = f"{estimate.interval.low:.3f}", f"{estimate.interval.high:.3f}"
    return text if low == high == text else f"{text} ({low}–{high})"


def _counted(reasons: Counter[str]) -> str:
    if not reasons:
        return "0"
    if len(reasons) == 1:
        return f"{reasons.total()}: {_words(next(iter(reasons)))}"
    parts = ", ".join(f"{_words(name)} {count}" for name, count in sorted(reasons.items()))
    return f"{reasons.total()}: {parts}"


def _words(reason: str) -> str:
    """Return a code as words, which a narrow column can wrap."""
    return reason.replace("_", " ")


def _cells(entry: Entry) -> list[str]:
    """Return one row of a workload's table."""
    if not entry.valid:
        why = entry.error or "; ".join(entry.invalid[:1]) or "not measured"
        kind = "not started" if entry.error else "invalid"
        return [entry.router, "0", f"{kind}: {why}"] + [NONE] * (len(HEADS) - 3)
    invalid = len(entry.invalid)
    row = [entry.router, str(len(entry.valid)) + (f" ({invalid} invalid)" if invalid else "")]
    for bucket, shares in (("chat", (0.5, 0.9, 0.99)), ("document", (0.5, 0.9, 1.0))):
        answered = entry.answered(bucket)
        times = []
        for share in shares:
            enough = share == 1.0 or samples_beyond(share, answered) >= MIN_BEYOND
            found = entry.ttft(bucket, share) if enough else None
            if found and share < 0.99:
                found = Estimate(found.value, None)
            times.append(seconds_spread(found).replace(" ", GAP))
        row.append(f"{answered:,}: {', '.join(times)}")
    return [
        *row, _share(entry.mean("attainment")), _share(entry.mean("hit_ratio")),
        _counted(entry.reasons("rejected")), _counted(entry.reasons("failed")),
    ]  # fmt: skip


def _title(group: Group) -> str:
    _, count, model, endpoint = group
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    return f"{count} simulated engines, {model}, {path}"


def _circumstances(entries: Sequence[Entry]) -> str:
    """Return dates, engines, versions and the speed of the machine."""
    runs = [run for entry in entries for run in entry.records]
    dates = sorted(run["date"][:10] for run in runs)
    speeds = sorted(run["machine"]["reference_ms"] for run in runs)
    versions = {run["router"]: run["version"] for run in runs if "error" not in run}
    scales = sorted({run["time_scale"] for run in runs})
    machine = runs[-1]["machine"]
    valid = sum(run.get("verdict") == "valid" for run in runs)
    seeds = sorted({run["seed"] for run in runs})
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"{span}; {runs[-1]['behind']}; time scale {' and '.join(f'{x:g}' for x in scales)}; "
        f"seeds {', '.join(map(str, seeds))}. Of {len(runs)} runs {valid} are valid. Machine: "
        f"{machine['cores']} cores, {machine['system']}, Python {machine['python']}, reference "
        f"loop {speeds[0]:.0f} to {speeds[-1]:.0f} ms. Versions: "
        + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    )  # fmt: skip


def _about(entries: Sequence[Entry]) -> str:
    """Describe the workload of `entries`, its targets, and the hit ratio of a perfect cache."""
    course = COURSES.get(entries[0].workload)
    about = course.about if course is not None else entries[0].workload
    runs = [run for entry in entries for run in entry.records]
    slos = "; ".join(dict.fromkeys(run["slo"] for run in runs)).replace(",", ", ")
    ideal = fmean(run["ideal_hit_ratio"] for run in runs)
    return (
        f"{about[:1].upper()}{about[1:]}. Targets: {slos}. One infinite cache for all engines "
        f"would hit {ideal:.3f}."
    )


def _by_place(names: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return each name once, in the order of `known`, and names that are no more at the end."""
    order = list(known)
    place = {name: order.index(name) if name in order else len(order) for name in names}
    return sorted(place, key=lambda name: place[name])
