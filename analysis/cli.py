"""The commands `forebay compare` and `forebay report`: parse, call, print."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import print_json, talk
from forebay.traces.ground.command_line.options import AsJson, Force, takes_options
from forebay.traces.ground.errors import InputError

if TYPE_CHECKING:
    from forebay.analysis.compare.compare import Comparison
    from forebay.analysis.compare.figures import Price
    from forebay.analysis.compare.headline import Headline
    from forebay.analysis.runs.run import RunData
    from forebay.analysis.runs.window import Cut
    from forebay.replay.plan.slo import Slo

SUFFIXES = {"markdown": "md", "csv": "csv"}

compare_app = new_app()
report_app = new_app()

Beyond = Annotated[
    int, typer.Option("--min-beyond", min=0, help="Hide a percentile with fewer samples beyond it.")
]
SloText = Annotated[
    str | None,
    typer.Option(
        "--slo", help="Recompute goodput for other targets, e.g. chat.ttft=2s,document.ttft=15s."
    ),
]


@dataclass(frozen=True, slots=True)
class FigureOptions:
    """Options of both commands: which requests count, the price of GPUs, and the output's form."""

    price_per_gpu_hour: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Price of a GPU for an hour: adds the cost of a million tokens."
        ),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs that the price counts; default: those of the run."),
    ] = None
    since: Annotated[
        str | None,
        typer.Option(help="Only requests due since then: 24h or 7d before the end, or a date."),
    ] = None
    between: Annotated[
        list[str] | None,
        typer.Option(
            metavar="START..END",
            help="Only requests due then: 1m..5m of the run, or dates. Once for each run, or "
            "several times for a single one, which are then compared.",
        ),
    ] = None
    unit: Annotated[
        str | None,
        typer.Option(help="Unit of a histogram file that does not state it: ns, us, ms, s."),
    ] = None
    markdown: Annotated[bool, typer.Option("--markdown", help="Write a Markdown table.")] = False
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV, in base units.")] = False
    as_json: AsJson = False

    def form(self) -> str:
        """Return markdown, csv or json, or "" for people. Raise InputError for two of them."""
        forms = {"markdown": self.markdown, "csv": self.as_csv, "json": self.as_json}
        chosen = [form for form, is_given in forms.items() if is_given]
        if len(chosen) > 1:
            raise InputError("--markdown, --csv and --json: give one of them")
        return chosen[0] if chosen else ""

    def cuts(self) -> "list[Cut]":
        """Return the windows of --since or --between. Raise InputError if they are no times."""
        from forebay.analysis.runs.window import parse_between, parse_since

        if self.since is not None and self.between:
            raise InputError("--since and --between: give one of them")
        if self.since is not None:
            return [parse_since(self.since)]
        return [parse_between(text) for text in self.between or ()]

    def load(self, paths: "Sequence[Path]") -> "list[RunData]":
        """Read the runs, cut to the windows. Raise InputError for a file without results."""
        from forebay.analysis.runs.load import load_runs
        from forebay.analysis.runs.sources.hlog import UNITS_S

        cuts = self.cuts()
        if self.unit is not None and self.unit not in UNITS_S:
            raise InputError(f"--unit {self.unit}: one of: {', '.join(UNITS_S)}")
        return load_runs(paths, cuts, self.unit)

    def price(self) -> "Price | None":
        """Return the price of GPUs, or None. Raise InputError for --gpus alone."""
        from forebay.analysis.compare.figures import Price

        if self.price_per_gpu_hour is None:
            if self.gpus is not None:
                raise InputError("--gpus: counts only with --price-per-gpu-hour; give both")
            return None
        return Price(self.price_per_gpu_hour, self.gpus)


@compare_app.command()
@takes_options
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B [C ...]",
            help="Run folders or result files; the first is the baseline.",
        ),
    ],
    *,
    slo: SloText = None,
    min_beyond: Beyond = 10,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Exit with status 1 if a run meets it, e.g. 'chat.ttft_p99 > 5%' (against A), "
            "'e2e_p50 > 2s' or 'attainment < 0.99'; may be repeated.",
        ),
    ] = None,
    fail_if_worse: Annotated[
        bool,
        typer.Option(
            "--fail-if-worse",
            help="Exit with status 1 if a run is worse in a figure of the headline, or the runs "
            "cannot be compared.",
        ),
    ] = False,
    figures: FigureOptions,
) -> None:
    """Compare runs with the first of them.

    Figures for --fail-if: ttft, ttft_failures, e2e, tpot, itl, stall and queue, each with _p50,
    _p90, _p95, _p99, _p99.9 or _max; attainment, hit_ratio, goodput, rejected, failed, answered;
    requests_per_s, output_tokens_per_s, prompt_tokens_per_s, total_tokens_per_s. A bucket and a dot
    in front count that bucket only.

    Example: forebay compare runs/direct runs/forebay --fail-if 'chat.ttft_p99 > 5%'

    Example: forebay compare baselines/main runs/new --fail-if-worse
    """
    from forebay.analysis.compare.compare import compare_all
    from forebay.analysis.compare.headline import headline
    from forebay.analysis.compare.limits import broken, parse_limit

    form = figures.form()
    if len(runs) < 2 and len(figures.cuts()) < 2:
        raise InputError("give two or more runs: the baseline, and those to compare with it")
    limits = [parse_limit(text) for text in fail_if or ()]
    loaded = figures.load(runs)
    slos, price = _slos(slo, loaded), figures.price()
    compared = compare_all(loaded, slos, min_beyond, price)
    words = [headline(comparison) for comparison in compared]
    failures = broken(compared, limits)
    _print(compared, words, failures if limits else None, form)
    if fail_if_worse:
        failures += _worse(words)
    for line in failures:
        print(f"forebay compare: {line}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


def _worse(words: "Sequence[Headline]") -> list[str]:
    """Return the summaries for which --fail-if-worse fails."""
    from forebay.analysis.compare.headline import DOUBTS

    lines = []
    for said in words:
        if said.mood == "doubtful":
            doubts = said.summary.partition(DOUBTS)[2]
            why = f"the runs cannot be compared: {doubts}" if doubts else said.summary
            lines.append(f"--fail-if-worse: {why}")
        elif said.mood in ("worse", "mixed"):
            lines.append(f"--fail-if-worse: {said.summary}")
    return lines


def _print(
    compared: "Sequence[Comparison]",
    words: "Sequence[Headline]",
    failures: list[str] | None,
    form: str,
) -> None:
    """Print the comparisons as csv, markdown or json, or else for people.

    Args:
        failures: they join the JSON if there were conditions.
    """
    if form in ("csv", "markdown"):
        sys.stdout.write(_plain_text(compared, [said.summary for said in words], form))
    elif form == "json":
        entries = [
            {"headline": said.summary, "mood": said.mood, "points": said.points}
            | comparison.as_json()
            for said, comparison in zip(words, compared, strict=True)
        ]
        data = entries[0] if len(entries) == 1 else {"comparisons": entries}
        print_json(data if failures is None else {**data, "failures": failures})
    else:
        from rich.console import Console

        from forebay.analysis.compare.tables import print_comparison

        for comparison, said in zip(compared, words, strict=True):
            print_comparison(comparison, said, Console(highlight=False))


def _plain_text(compared: "Sequence[Comparison]", summaries: list[str], form: str) -> str:
    from forebay.analysis.compare.tables import csv_table, markdown

    return csv_table(compared) if form == "csv" else markdown(compared, summaries)


@report_app.command()
@takes_options
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders or result files; the first is the baseline. Or folders of searches.",
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file to write; default: report.html, .md or .csv."),
    ] = None,
    slo: SloText = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    min_beyond: Beyond = 10,
    force: Force = False,
    figures: FigureOptions,
) -> None:
    """Write one self-contained HTML page about one or more runs.

    Example: forebay report runs/direct runs/forebay -o report.html
    """
    from forebay.analysis.compare.compare import compare_all
    from forebay.analysis.compare.headline import headline
    from forebay.analysis.report.curves import curves_page, is_curve
    from forebay.analysis.report.report import build_report, write_text
    from forebay.analysis.statistics.units import is_text, printable

    # Wrong options are errors before any run is read.
    form = figures.form()
    out = out or Path(f"report.{SUFFIXES.get(form, 'html')}")
    if not is_text(str(out)):
        raise InputError(f"--out {printable(str(out))}: is not UTF-8; give another name")
    if form == "json" and str(out) == "-":
        raise InputError("--json: standard output has the page already (-o -); give -o FILE")
    if all(map(is_curve, runs)) and not form:
        write_text(curves_page(runs, title), out, force)
        talk(f"wrote {out}")
        return
    loaded = figures.load(runs)
    price = figures.price()
    slos = _slos(slo, loaded)
    # A table of the figures, or the page.
    if form in ("markdown", "csv"):
        compared = compare_all(loaded, slos, min_beyond, price)
        said = [headline(each).summary for each in compared] if len(loaded) > 1 else []
        write_text(_plain_text(compared, said, form), out, force)
    else:
        page = build_report(loaded, slos, min_beyond, title, price)
        write_text(page.html, out, force)
        if form == "json":
            print_json({"path": str(out), "headline": page.summary, "warnings": page.warnings})
            return
        talk(page.summary)
        for warning in page.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    if str(out) != "-":
        talk(f"wrote {out}")


def _slos(text: str | None, runs: "Sequence[RunData]") -> "tuple[Slo, ...]":
    from forebay.replay.plan.slo import parse_slos

    if text is None:
        return ()
    # A bucket without requests may still have a target.
    names = [name for run in runs for name in (*run.planned_buckets(), *run.buckets())]
    return parse_slos(text, list(dict.fromkeys(names)))
