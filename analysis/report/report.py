"""Build the HTML report of one or more runs. The others are compared with the first.

Every sentence is computed from the runs, and every text from a file is escaped. The page is a
single file that needs no other. `write_report` overwrites nothing without `force`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from forebay.analysis.compare.compare import Comparison, compare
from forebay.analysis.compare.cost import Price
from forebay.analysis.compare.headline import Headline, headline, single
from forebay.analysis.report import tables
from forebay.analysis.report.breakdown import breakdown_section
from forebay.analysis.report.page import html_page
from forebay.analysis.report.plots import OTHERS, legend_mark, percentile_plot, timeline_plot
from forebay.analysis.runs.provenance import setting, text_of
from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.quantiles import MIN_BEYOND
from forebay.analysis.statistics.units import is_text, printable
from forebay.replay.plan.slo import Slo
from forebay.traces.errors import InputError
from forebay.traces.whole_file import whole_file

MOST_WARNINGS = 5  # the others are folded
TOGETHER = 2  # runs whose dots share one plot over time
MAX_RUNS = 10  # the page has as many colours that are easy to distinguish

_UNIT = re.compile(r"(?<=\d) (?=(?:m?s|/s|%)(?:\W|$))")
_TOGETHER = "\N{NO-BREAK SPACE}"  # keeps a number and its unit on one line


@dataclass(frozen=True, slots=True)
class ReportPage:
    """A finished page with its summary and warnings."""

    html: str
    summary: str
    warnings: tuple[str, ...]


def build_report(
    runs: Sequence[RunData],
    slos: Sequence[Slo] = (),
    min_beyond: int = MIN_BEYOND,
    title: str | None = None,
    price: Price | None = None,
) -> ReportPage:
    """Build the report of `runs`.

    Raises:
        InputError: no run, more than MAX_RUNS, or a title that is not UTF-8.
    """
    if title and not is_text(title):
        raise InputError(f"--title {printable(title)}: is not UTF-8; write it in UTF-8")
    if not 1 <= len(runs) <= MAX_RUNS:
        raise InputError(f"{len(runs)} runs: a report takes 1 to {MAX_RUNS}")
    # A single run is compared with itself; only the first column of the rows is shown.
    comparisons = [compare(runs[0], run, slos, min_beyond, price) for run in (runs[1:] or runs)]
    headlines = [headline(comparison) for comparison in comparisons] if len(runs) > 1 else []
    title = title or _title([run.name for run in runs])
    warnings = _warnings(comparisons)
    alone = (
        [] if headlines else single({key: two[0] for key, two in comparisons[0].figures.items()})
    )
    # The page goes from the verdict down to single figures and their origin.
    body = [
        _top(title, runs),
        _headlines(headlines),
        _warning_box(warnings),
        tables.cards(runs, comparisons),
        _points(headlines[0].points if len(headlines) == 1 else alone),
        _plots(runs, min_beyond),
        breakdown_section(runs, min_beyond),
        tables.figures_table(runs, comparisons),
        tables.rejections_table(runs),
        tables.backends_table(runs),
        tables.provenance_section(runs),
        tables.definitions(min_beyond, slos),
    ]  # fmt: skip
    summary = " ".join([head.summary for head in headlines] or alone)
    return ReportPage(html_page(f"{title} · Forebay", "\n".join(body)), summary, warnings)


def write_report(page: ReportPage, out: Path, force: bool = False) -> None:
    """Write the page as `write_text` does."""
    write_text(page.html, out, force)


def write_text(text: str, out: Path, force: bool = False) -> None:
    """Write a file completely or not at all. `-` is standard output.

    Raises:
        InputError: the file exists without `force`, or cannot be written.
    """
    if out.is_dir():
        raise InputError(f"--out {out}: is a folder; name a file, e.g. {out / 'report.html'}")
    if out.is_file() and str(out) != "-" and not force:
        raise InputError(f"--out {out}: exists; give another name, or --force to overwrite it")
    with whole_file(out) as file:
        file.write(text.encode())


def _title(names: Sequence[str]) -> str:
    if len(names) == 2:
        return f"{names[1]} compared with {names[0]}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _top(title: str, runs: Sequence[RunData]) -> str:
    first = runs[0]
    facts = [f"{first.requests:,} requests"]
    for what, say in (("trace", "trace {}"), ("rate", "{} requests per second"), ("model", "{}")):
        if value := text_of(setting(first, what)):
            facts.append(say.format(Path(value).name if what == "trace" else value))
    scale = text_of(setting(first, "time scale"))
    if scale not in ("", "1"):
        facts.append(f"simulated time, {scale} times as fast as real time")
    return (
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(" · ".join(facts))}</p></header>'
    )


def _warnings(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for comparison in comparisons for text in comparison.warnings))


def _warning_box(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    rest = warnings[MOST_WARNINGS:]
    more = f"<details><summary>{len(rest)} more</summary>{_list(rest)}</details>" if rest else ""
    return (
        '<div class="warnings" role="note"><strong>Read with care</strong>'
        f"{_list(warnings[:MOST_WARNINGS])}{more}</div>"
    )


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def _points(points: Sequence[str]) -> str:
    items = "".join(f"<li>{_UNIT.sub(_TOGETHER, escape(point))}</li>" for point in points)
    return f'<ul class="points">{items}</ul>' if points else ""


def _headlines(headlines: Sequence[Headline]) -> str:
    """One sentence for each comparison. With several, each unfolds its figures."""
    if len(headlines) == 1:
        (head,) = headlines
        return f'<p class="summary {head.mood}">{escape(head.summary)}</p>'
    return "".join(
        f'<details class="summary {head.mood}"><summary>{escape(head.summary)}</summary>'
        f"{_points(head.points)}</details>"
        for head in headlines
    )


def _legend(runs: Sequence[RunData]) -> str:
    """Name each run, with its seed where the seeds differ."""
    seeds = [text_of(setting(run, "seed")) for run in runs]
    labels = [f"{run.name}, seed {seed}" if len(set(seeds)) > 1 and seed else run.name
            for run, seed in zip(runs, seeds, strict=True)]  # fmt: skip
    items = "".join(
        f"<li>{legend_mark(number)}{escape(name)}</li>" for number, name in enumerate(labels)
    )
    return f'<ul class="legend">{items}</ul>'


def _timelines(runs: Sequence[RunData], buckets: Sequence[str]) -> list[tuple[str, str]]:
    """One plot for each bucket. With many runs each has its own, as dots would hide each other."""
    if len(runs) <= TOGETHER:
        return [(name, timeline_plot(runs, name)) for name in buckets]
    return [
        (f"{name}, {run.name}", timeline_plot([run], name, number))
        for name in buckets
        for number, run in enumerate(runs)
    ]


def _plots(runs: Sequence[RunData], min_beyond: int) -> str:
    buckets = list(dict.fromkeys(name for run in runs for name in run.buckets()))
    legend = _legend(runs)
    percentile = [(name, percentile_plot(runs, name, min_beyond)) for name in buckets]
    # Latencies without samples have no plot.
    others = [
        (f"{name}: {quantity.name}", f'{plot}<div class="readout"></div>')
        for name in buckets
        for quantity in OTHERS
        if (plot := percentile_plot(runs, name, min_beyond, quantity))
    ]
    timeline = _timelines(runs, buckets)
    dotted = (
        " Dotted: with rejected and failed requests counted as infinitely late."
        if any((run.words["outcome"] != "ok").any() for run in runs)
        else ""
    )
    # The section of other latencies is left out when it would be empty.
    return (
        _section(
            "Time to first token by percentile",
            "Answered requests, from when each was due; both axes are logarithmic. Marks: p50, "
            f"p90, p95, p99 and p99.9. A thin line: fewer than {min_beyond} samples beyond."
            f"{dotted}",
            legend,
            [
                (name, f'{plot}<div class="readout"></div>' if plot else "")
                for name, plot in percentile
            ],
        )
        + _section(
            "Time to first token over the run",
            "Each dot is an answered request, at the time it was due. Strokes below the axis are "
            "rejected or failed requests.",
            legend,
            timeline,
        )
        + (
            _section(
                "The other latencies by percentile",
                "As above. Where a tool defines a latency otherwise, the table below says so.",
                legend,
                others,
            )
            if others
            else ""
        )
    )


def _section(title: str, caption: str, legend: str, plots: Sequence[tuple[str, str]]) -> str:
    figures = [
        f"<figure><h3>{escape(name)}</h3>"
        + (plot or '<p class="soft small">No request of this bucket was answered.</p>')
        + "</figure>"
        for name, plot in plots
    ]
    kind = "plots one" if len(figures) == 1 else "plots"
    return (
        f'<section><h2>{title}</h2><p class="soft small">{escape(caption)}</p>{legend}'
        f'<div class="{kind}">{"".join(figures)}</div></section>'
    )
