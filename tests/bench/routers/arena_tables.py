"""The results as Markdown: each workload's figures and rejections.

Every number comes from `arena_results`; a router without figures is there with the reason.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from arena_contenders import CONTENDERS
from arena_courses import COURSES, CPU_COURSES
from arena_plan import Record
from arena_results import OURS, Comparison, Entry, Estimate, Group, groups

from forebay.analysis.statistics.units import NEVER, NONE

HEADS = (
    "router", "seeds", "chat TTFT p50", "p99", "p99.9", "worst stall", "document TTFT p50", "p99",
    "p99.9", "document stall", "goodput /s", "attained", "hit ratio", "imbalance", "rejected",
    "failed",
)  # fmt: skip
ON_THE_HTML_PAGE_ONLY = {
    "p99.9", "worst stall", "document stall", "goodput /s", "imbalance",
}  # fmt: skip
BEST_HEADS = (
    "workload", "figure", "ours", "our figure", "best peer", "its figure", "better by",
    "answered: ours, its", "seeds",
)  # fmt: skip
LEGEND = (
    "TTFT counts from when a request was due, of answered requests, all seeds together; stalls are "
    "the worst of all. Goodput: requests a second that met the stated targets; attained: their "
    "share of all that were sent, refused ones being missed. Imbalance: prompt tokens of the "
    "busiest engine over those of the idlest. In brackets: 95 % interval over seeds."
)


def seconds(value: float | None) -> str:
    """Three digits, `s` or `ms`."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return NEVER
    return f"{value:.3g} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"


def spread(estimate: Estimate | None, form: str = "{:.2f}", unit: str = "") -> str:
    """A value with its interval; the unit stands behind the value only."""
    if estimate is None:
        return NONE
    told = form.format(estimate.value)
    if estimate.interval is None:
        return told + unit
    low, high = form.format(estimate.interval.low), form.format(estimate.interval.high)
    return told + unit + ("" if low == high == told else f" ({low}–{high})")


def seconds_spread(estimate: Estimate | None) -> str:
    """`18 s (14.5–20)`; units are repeated where they are not the same."""
    if estimate is None:
        return NONE
    told = seconds(estimate.value)
    if estimate.interval is None:
        return told
    low, high = seconds(estimate.interval.low), seconds(estimate.interval.high)
    if low == high:
        return told
    unit = told.partition(" ")[2]
    if unit and all(end.partition(" ")[2] == unit for end in (low, high)):
        low, high = low.partition(" ")[0], high.partition(" ")[0]
    return f"{told} ({low}–{high})"


def counted(reasons: Counter[str]) -> str:
    if not reasons:
        return "0"
    if len(reasons) == 1:
        return f"{reasons.total()}: {next(iter(reasons))}"
    told = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()))
    return f"{reasons.total()}: {told}"


def ratio(value: float | None) -> str:
    if value is None:
        return NONE
    return "∞" if math.isinf(value) else f"{value:.2f}"


def cells_of(entry: Entry) -> list[str]:
    """One row of a workload's table."""
    if not entry.valid:
        why = entry.error or "; ".join(entry.invalid[:1]) or "not measured"
        kind = "not started" if entry.error else "invalid"
        return [entry.router, "0", f"{kind}: {why}"] + [NONE] * (len(HEADS) - 3)
    invalid = len(entry.invalid)
    row = [entry.router, str(len(entry.valid)) + (f" ({invalid} invalid)" if invalid else "")]
    for bucket in ("chat", "document"):
        row += [seconds_spread(entry.ttft(bucket, share)) if share == 0.99
                else seconds(estimate.value if (estimate := entry.ttft(bucket, share)) else None)
                for share in (0.5, 0.99, 0.999)]  # fmt: skip
        row.append(seconds(entry.worst_stall_s(bucket)))
    return [
        *row,
        spread(entry.mean("goodput_per_s")),
        spread(entry.mean("attainment"), "{:.3f}"),
        spread(entry.mean("hit_ratio"), "{:.3f}"),
        ratio(entry.imbalance()),
        counted(entry.reasons("rejected")),
        counted(entry.reasons("failed")),
    ]


def tables(records: Sequence[Record]) -> str:
    """Everything there is, as Markdown."""
    parts = []
    for group, found in groups(records).items():
        entries = in_course_order(found)
        parts.append(f"## {title(group)}\n\n{circumstances(entries)}\n")
        for workload in order_of(entries):
            of = ranked([one for one in entries if one.workload == workload])
            rows = [HEADS, *map(cells_of, of)]
            parts.append(f"### {workload}\n\n{about_of(of, group)}\n\n{markdown(rows)}\n")
    return "\n".join(parts) if parts else "No results yet.\n"


def title(group: Group) -> str:
    engines, count, model, endpoint = group
    kind = "simulated engines" if engines == "sim" else "real vLLM servers on the CPU"
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    return f"{count} {kind}, {model}, {path}"


def circumstances(entries: Sequence[Entry]) -> str:
    """When, behind what, which versions, how fast the machine was."""
    runs = [one for entry in entries for one in entry.records]
    measured = [one for one in runs if "error" not in one]
    dates = sorted(one["date"][:10] for one in runs)
    speeds = sorted(one["machine"]["reference_ms"] for one in runs)
    versions = {one["router"]: one["version"] for one in measured}
    scales = sorted({one["time_scale"] for one in runs})
    machine = runs[-1]["machine"]
    valid = sum(one.get("verdict") == "valid" for one in runs)
    seeds = sorted({one["seed"] for one in runs})
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"{span}; {runs[-1]['behind']}; time scale {' and '.join(f'{one:g}' for one in scales)}; "
        f"seeds {', '.join(map(str, seeds))}; {valid} of {len(runs)} runs valid; "
        f"{machine['cores']} cores, {machine['system']}, Python {machine['python']}, reference "
        f"loop {speeds[0]:.0f} to {speeds[-1]:.0f} ms. Versions: "
        + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    )  # fmt: skip


def best_cells(one: Comparison) -> list[str]:
    """One row of that table."""
    rate = one.figure == "goodput"
    mine, its = (f"{v:.2f} /s" if rate else seconds(v) for v in (one.ours, one.theirs))
    return [
        one.workload, one.figure, one.router, mine, one.best, its, spread(one.gain, unit="x"),
        f"{100 * one.answered:.3g}, {100 * one.they_answered:.3g} %", str(one.seeds),
    ]  # fmt: skip


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of the columns that are not only on the HTML page."""
    shown = [place for place, head in enumerate(rows[0]) if head not in ON_THE_HTML_PAGE_ONLY]
    head, *rest = [[row[place].replace("|", "\\|") for place in shown] for row in rows]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rest)])


def order_of(entries: Sequence[Entry]) -> list[str]:
    known = [*COURSES, *CPU_COURSES]
    there = dict.fromkeys(entry.workload for entry in entries)
    return sorted(there, key=lambda name: known.index(name) if name in known else len(known))


def in_course_order(entries: Sequence[Entry]) -> list[Entry]:
    """Sort by the plan's order of workloads, not by the time of measurement."""
    order = order_of(entries)
    return sorted(entries, key=lambda one: order.index(one.workload))


def ranked(entries: Sequence[Entry]) -> list[Entry]:
    """In the order in which routers are listed; ours first, also those that are no more."""
    known = list(dict.fromkeys((*OURS, *CONTENDERS)))
    return sorted(
        entries, key=lambda one: known.index(one.router) if one.router in known else len(known)
    )


def about_of(entries: Sequence[Entry], group: Group) -> str:
    """Describe the workload of `entries`, its targets, and the hit ratio of a perfect cache."""
    workload = entries[0].workload
    course = (COURSES if group[0] == "sim" else CPU_COURSES).get(workload)
    about = course.about if course is not None else workload
    runs = [one for entry in entries for one in entry.records]
    slos = "; ".join(dict.fromkeys(one["slo"] for one in runs)).replace(",", ", ")
    ideal = fmean(one["ideal_hit_ratio"] for one in runs)
    return (
        f"{about[:1].upper()}{about[1:]}. Targets: {slos}. One infinite cache for all engines "
        f"would hit {ideal:.3f}."
    )
