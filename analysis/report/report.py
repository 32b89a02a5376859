"""Build the HTML report of one or more runs. The others are compared with the first.

Every sentence is computed from the runs. The page is a single file that needs no other. The
template `report.html` is filled by Jinja2, which escapes all texts that are not Markup. The content
security policy forbids every outside resource and any other script, so that a name in a trace can
never run as code. Without the script, only the values under the percentile plots are missing.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from forebay.analysis.compare.compare import compare_all, definition_notes, rows_of, sides_of
from forebay.analysis.compare.figures import Price, RunFigures
from forebay.analysis.compare.headline import headline
from forebay.analysis.report import tables
from forebay.analysis.report.plots import (
    OTHERS,
    legend_mark,
    load_plots,
    percentile_plot,
    timeline_plot,
)
from forebay.analysis.runs.provenance import simulated
from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.quantiles import MIN_BEYOND
from forebay.analysis.statistics.units import (
    counts,
    is_text,
    listed,
    printable,
    ratio,
    shares,
)
from forebay.replay.plan.slo import Slo
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.whole_file import whole_file

TOGETHER = 2  # runs whose dots share one plot over time
MAX_RUNS = 10  # the page has as many colours that are easy to distinguish

_UNIT = re.compile(r"(?<=\d) (?=(?:m?s|/s|%)(?:\W|$))")
_TOGETHER = "\N{NO-BREAK SPACE}"  # keeps a number and its unit on one line
_JINJA = Environment(
    autoescape=True,
    keep_trailing_newline=True,
    lstrip_blocks=True,
    trim_blocks=True,
    undefined=StrictUndefined,
)
_JINJA.filters |= {
    "counts": counts,
    "ratio": ratio,
    "shares": shares,
    "together": lambda text: _UNIT.sub(_TOGETHER, text),
}


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
    # Figures are computed once. Sentences, cards, tables and plots only choose among them.
    comparisons = compare_all(runs, slos, min_beyond, price)
    sides, rows = sides_of(comparisons), rows_of(comparisons)
    headlines = [headline(each) for each in comparisons]
    warnings = tuple(dict.fromkeys(chain.from_iterable(each.warnings for each in comparisons)))
    origins = [tables.origin(run) for run in runs]
    # The page goes from the verdict down to single figures and their origin.
    html = render(
        "report.html",
        title=title or _title(runs),
        runs=sides,
        facts=_facts(sides[0], origins[0].texts),
        headlines=headlines,
        warnings=warnings,
        cards=tables.cards(comparisons[0], rows),
        legend=_legend(origins),
        origin_note=_origin_note(runs),
        **_drawings(sides, min_beyond),
        parts=tables.PARTS,
        figures=rows,
        notes=definition_notes(comparisons),
        unanswered=tables.rejections(sides),
        backends=tables.balance(sides),
        origins=origins,
        slos=slos,
        min_beyond=min_beyond,
    )
    return ReportPage(html, " ".join(head.summary for head in headlines), warnings)


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


def render(template: str, **values: Any) -> str:
    """Fill a template of this room with the values, the style and the script."""
    html, style, script = (
        files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in (template, "report.css", "report.js")
    )
    return _JINJA.from_string(html).render(
        style=Markup(style),
        script=Markup(script),
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def _title(runs: Sequence[RunData]) -> str:
    names = [f"{run.name} (simulated)" if simulated(run) else run.name for run in runs]
    return f"{names[1]} compared with {names[0]}" if len(names) == 2 else listed(names)


def _facts(side: RunFigures, texts: Mapping[str, str]) -> list[str]:
    """Say in short how the load was made."""
    facts = [f"{side.of[None].intended:,} requests"]
    facts += [simulated(side.run)] if simulated(side.run) else []
    for what, say in (("trace", "trace {}"), ("rate", "{} requests per second"), ("model", "{}")):
        if value := texts.get(what):
            facts.append(say.format(Path(value).name if what == "trace" else value))
    scale = texts.get("time scale", "1")
    if scale != "1":
        facts.append(f"simulated time, {scale} times as fast as real time")
    return facts


def _origin_note(runs: Sequence[RunData]) -> str:
    """Say for the title of each chart which runs are simulated, "" if none is."""
    notes = {run.name: simulated(run) for run in runs}
    if len(set(notes.values())) == 1:
        return next(iter(notes.values()))
    return "; ".join(f"{name} {note}" for name, note in notes.items() if note)


def _legend(origins: Sequence[tables.RunOrigin]) -> list[str]:
    """Name each run, with its seed where the seeds differ."""
    differ = len({origin.seed for origin in origins}) > 1
    return [
        f"{origin.name}, seed {origin.seed}" if differ and origin.seed else origin.name
        for origin in origins
    ]


def _drawings(runs: Sequence[RunFigures], min_beyond: int) -> dict[str, Any]:
    """Draw each bucket. A drawing stands behind its title."""
    buckets = list(dict.fromkeys(name for run in runs for name in run.buckets))
    # Dots of many runs would hide each other.
    if len(runs) <= TOGETHER:
        timelines = [(name, timeline_plot(runs, name)) for name in buckets]
    else:
        timelines = [
            (f"{name}, {run.name}", timeline_plot(runs, name, [number]))
            for name in buckets
            for number, run in enumerate(runs)
        ]
    others = [
        (f"{name}: {quantity.name}", percentile_plot(runs, name, min_beyond, quantity))
        for name in buckets
        for quantity in OTHERS
    ]
    # Latencies without samples have no plot.
    return {
        "marks": [legend_mark(number) for number in range(len(runs))],
        "ttft": [(name, percentile_plot(runs, name, min_beyond)) for name in buckets],
        "timelines": timelines,
        "loads": load_plots(runs),
        "other_latencies": [(title, plot) for title, plot in others if plot],
        "spent": tables.breakdown(runs, buckets, min_beyond),
    }
