"""`forebay runs`: write runs in the formats of other tools."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.proxy.command import new_app
from forebay.traces.command_options import Force, Output
from forebay.traces.errors import InputError

HELP = """Runs in the formats of other tools.

Example:

  forebay runs export vllm-bench runs/a -o result.json
"""
EXPORT = """Write a run in the format of another tool.

csv         one line a request, all columns
llm-d       the JSON of an llm-d Benchmark Report v0.2
hgrm        percentile distribution of a metric (--tag), for HdrHistogram plots
vllm-bench  the JSON of vllm bench serve --save-result --save-detailed

Installed packages add formats by the entry point group forebay.exporters.

Example:

  forebay runs export hgrm runs/a --tag ttft_response.chat -o chat.hgrm
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
) -> None:
    from forebay.analysis.exporters import exporters
    from forebay.traces.output import refuse_existing, whole_file

    known = exporters()
    if format_name not in known:
        raise InputError(f"no format {format_name!r}; one of: {', '.join(sorted(known))}")
    refuse_existing([output], force=force)
    with whole_file(output) as file:
        known[format_name](run, file, tag)
