"""The commands `forebay compare` and `forebay report`: parse, call, print."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.proxy.command import new_app
from forebay.traces.errors import InputError
from forebay.traces.talk import talk

if TYPE_CHECKING:
    from forebay.analysis.run import RunData
    from forebay.replay.slo import Slo

compare_app = new_app()
report_app = new_app()

Beyond = Annotated[
    int,
    typer.Option(
        "--min-beyond",
        min=0,
        help="Hide a percentile with fewer samples beyond it.",
    ),
]
SloText = Annotated[
    str | None,
    typer.Option(
        "--slo", help="Recompute goodput for other targets, e.g. chat.ttft=2s,document.ttft=15s."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@compare_app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The baseline run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The run of interest.")],
    slo: SloText = None,
    min_beyond: Beyond = 10,
    fail_if_worse: Annotated[
        bool,
        typer.Option(
            "--fail-if-worse",
            help="Exit with status 1 if B is worse in a figure of the headline, or the runs "
            "cannot be compared.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two runs.

    Example: forebay compare runs/round-robin runs/forebay --slo chat.ttft=2s,document.ttft=15s
    """
    from forebay.analysis.compare import compare as compare_runs
    from forebay.analysis.headline import headline
    from forebay.analysis.run import load_runs

    runs = load_runs([a, b])
    comparison = compare_runs(runs[0], runs[1], _slos(slo, runs), min_beyond)
    words = headline(comparison)
    if as_json:
        said = {"headline": words.summary, "mood": words.mood, "points": words.points}
        _print_json(said | comparison.as_json())
    else:
        from rich.console import Console

        from forebay.analysis.terminal import print_comparison

        print_comparison(comparison, words, Console(highlight=False))
    if fail_if_worse and words.mood in ("worse", "mixed", "doubtful"):
        raise typer.Exit(1)


@report_app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders; the first is the baseline."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path(
        "report.html"
    ),
    slo: SloText = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    min_beyond: Beyond = 10,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about one or more runs.

    Example: forebay report runs/round-robin runs/forebay -o report.html
    """
    from forebay.analysis.report import build_report, write_report
    from forebay.analysis.run import load_runs
    from forebay.analysis.units import is_text, printable

    if not is_text(str(out)):
        raise InputError(f"--out {printable(str(out))}: is not UTF-8; give another name")
    loaded = load_runs(runs)
    page = build_report(loaded, _slos(slo, loaded), min_beyond, title)
    write_report(page, out, force)
    if as_json:
        _print_json({"path": str(out), "headline": page.summary, "warnings": page.warnings})
        return
    talk(page.summary)
    for warning in page.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    talk(f"wrote {out}")


def _slos(text: str | None, runs: "Sequence[RunData]") -> "tuple[Slo, ...]":
    from forebay.replay.slo import parse_slos

    if text is None:
        return ()
    # A bucket without requests may still have a target.
    names = [name for run in runs for name in (*run.planned_buckets(), *run.buckets())]
    return parse_slos(text, list(dict.fromkeys(names)))


def _print_json(data: dict[str, Any]) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n")
