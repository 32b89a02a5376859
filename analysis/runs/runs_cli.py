"""`forebay runs`: merge runs, write them in the formats of other tools, score their answers."""

import sys
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import print_json, talk
from forebay.traces.ground.command_line.options import AsJson, Force, Output
from forebay.traces.ground.errors import InputError

HELP = """Merged runs, runs in the formats of other tools, and scores of their answers.

Example:

  forebay runs export vllm-bench runs/a -o result.json
"""
EXPORT = """Write a run in the format of another tool.

Formats:
  csv         one line a request, all columns
  hgrm        percentiles of a metric (--tag), for HdrHistogram plots
  vllm-bench  the JSON of vllm bench serve --save-result --save-detailed
  otlp        sends gauges to OTEL_EXPORTER_OTLP_ENDPOINT

Other packages add formats.

Example:

  forebay runs export hgrm runs/a --tag ttft_response.chat -o chat.hgrm
"""
MERGE = """Merge run folders into one, exactly.

Rates of runs that were sent at the same time, from several machines, add up. Rates of
runs that were sent one after the other, such as seeds, are averaged. Target, trace, pace
and latency targets must agree.

Example:

  forebay runs merge runs/seed1 runs/seed2 runs/seed3 --out runs/seeds
"""
SCORE = """Score the answers of a run of `traces zeroscrolls` or `traces needle`.

ZeroSCROLLS is scored by its own metrics, a needle by the number that it hides. The
run must have been made with --keep-answers. A request without an answer scores 0.

Example:

  forebay runs score runs/a
"""

app = new_app(help=HELP)


@app.callback()
def runs() -> None:
    pass


@app.command(help=EXPORT)
def export(
    format_name: Annotated[str, typer.Argument(metavar="FORMAT", help="name of the format")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run folder")],
    output: Output = "-",
    tag: Annotated[
        str, typer.Option(help="metric of hgrm, with or without a bucket")
    ] = "ttft_response",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    from forebay.analysis.runs.exporters import exporters
    from forebay.traces.ground.whole_file import refuse_existing, whole_file

    formats = exporters()
    if format_name not in formats:
        raise InputError(f"no format {format_name!r}; one of: {', '.join(sorted(formats))}")
    refuse_existing([output], force=force)
    result = {"format": format_name, "run": str(run)}
    if as_json and output == "-":
        if format_name != "otlp":  # its output says where the run was sent
            raise InputError("--json: standard output has the export already; give -o FILE")
        where = BytesIO()
        formats[format_name](run, where, tag)
        result["sent_to"] = where.getvalue().decode().strip()
    else:
        result["path"] = output
        with whole_file(output) as file:
            formats[format_name](run, file, tag)
    if as_json:
        print_json(result)


@app.command(help=MERGE)
def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="two or more run folders")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the merged run")],
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    from forebay.analysis.runs.merge_runs import merge_runs

    merged = merge_runs(runs, out, force=force)
    if as_json:
        print_json(dict(merged.summary))
    how = "sent at once: rates add up" if merged.at_once else "one after the other: mean rates"
    talk(f"{merged.summary['requests']:,} requests of {len(runs)} runs, {how}; kept in {out}")


@app.command(help=SCORE)
def score(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run folder")],
    references: Annotated[
        Path | None,
        typer.Option(help="file of reference answers; default: the one beside the run's trace"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    from forebay.analysis.score.score import score_run

    result = score_run(run, references)
    if as_json:
        print_json(result)
    else:
        _show(result)
    for warning in result["warnings"]:
        print(f"forebay runs: {warning}", file=sys.stderr)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "metric")
    for heading in ("score (0-100)", "requests", "unanswered"):
        table.add_column(heading, justify="right")
    for task, scores in result["tasks"].items():
        counts = (str(scores["requests"]), str(scores["unanswered"]))
        table.add_row(task, scores["metric"].replace("_", " "), f"{scores['score']:.2f}", *counts)
    if result["zeroscrolls"] is not None:
        table.add_row("ZeroSCROLLS", "mean of the ten tasks", f"{result['zeroscrolls']:.2f}")
    Console().print(table)
