"""`forebay traces import`, `export`, `formats` and `fit`: traffic of other tools in and out."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from forebay.traces.cli.output import (
    Totals,
    check_output,
    print_result,
    report,
    to_file,
    write_whole,
)
from forebay.traces.formats import FOREBAY, ReadOptions, detect, formats, open_trace, trace_format
from forebay.traces.formats.columns import Mapping, doubts, map_text, mapped_format, parse_map
from forebay.traces.formats.guess import guess
from forebay.traces.ground.command_line.messages import print_json, talk
from forebay.traces.ground.command_line.options import (
    AsJson,
    Force,
    Output,
    Seed,
    one_or_more,
    takes_options,
)
from forebay.traces.ground.errors import InputError, escaped
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.trace_line import row_bytes
from forebay.traces.ground.whole_file import meta_path, whole_file
from forebay.traces.reading.reader import TraceReader

SHOWN_ROWS = 3
FAST_PER_S = 100.0  # few services have more requests, but seconds read as milliseconds have
TraceFile = Annotated[str, typer.Argument(metavar="TRACE", help="trace file; - is stdin")]

HEADINGS = {
    "Lengths that the file does not tell": "input-tokens output-tokens block-tokens tokens",
    "Sessions and client sets": "mode session-gap longest-pause start duration",
}


@takes_options
def import_trace(
    *,
    format_name: Annotated[
        str,
        typer.Argument(metavar="FORMAT", help="a name that forebay traces formats lists, or auto"),
    ],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="file or, for some formats, folder; - is stdin")
    ],
    output: Output = "-",
    columns: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="TARGET=COLUMN[:UNIT],...",
            help="columns of any other CSV, JSON or Parquet file",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show format, mapping and first rows; write nothing")
    ] = False,
    options: ReadOptions,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Convert traffic of any known format, or any table of requests, to a trace.

    Each row that cannot be read is an error that names it, unless --skip-bad counts it. Rows that
    are no requests to a model are counted by their reason.

    example:  forebay traces import auto production.jsonl --dry-run

    example:  forebay traces import mooncake conversation_trace.jsonl -o conversation.jsonl

    example:  forebay traces import auto log.csv --map arrival=ts:ms,input=prompt_tokens,output==128
    """
    # Check all options before a file is opened.
    if not dry_run:
        check_output(output, meta_path(output), force=force, as_json=as_json)
    # Open the file, and only show it in a dry run.
    reader, name, mapping, unsure = _open(format_name, file, columns, options)
    guessed = bool(mapping) and columns is None
    for doubt in unsure:
        talk(f"warning: {doubt}")
    if dry_run:
        _show(reader, name, mapping, guessed, as_json)
        return
    if guessed:
        talk(f"guessed:  --map {mapping}")

    # Convert as a stream. The facts are read after the last row.
    def facts() -> dict[str, Any]:
        return {
            "command": "import",
            "format": name,
            "map": mapping,
            "file": file,
            "seed": options.seed if name in ("servegen", "kv-cache-tester") else None,
            "skipped": reader.skipped,
            "ignored": dict(reader.ignored),
            "notes": dict(reader.notes),
        }

    totals = Totals(_first_told(reader) if guessed else reader)
    report(write_whole(output, totals, facts), output, as_json)
    _tell_losses(reader)
    if totals.requests > FAST_PER_S * totals.last_s > 0.0:
        talk(
            f"note: {totals.requests / totals.last_s:,.0f} requests a second; if the times are in "
            "another unit, give --time-unit (mooncake, aiperf) or the unit in --map"
        )


def _open(
    format_name: str, file: str, columns: str | None, options: ReadOptions
) -> tuple[TraceReader, str, str | None, list[str]]:
    """Return the reader, the name of its format, its mapping of columns, and doubts about it."""
    names = ("input_tokens", "output_tokens", "block_tokens")
    one_or_more({f"--{name.replace('_', '-')}": getattr(options, name) for name in names})

    def mapped(mapping: Mapping) -> tuple[TraceReader, str, str | None, list[str]]:
        reader = mapped_format(mapping).open(file, options)
        return reader, "map", map_text(mapping), doubts(mapping)

    # A given mapping needs no format.
    if columns is not None:
        if format_name != "auto":
            raise InputError(f"--map: {format_name} has set columns; use traces import auto")
        return mapped(parse_map(columns))
    # Else find the format: by its name, by the first bytes, or by a guess at the columns.
    name = format_name
    if name == "auto":
        detected = detect(file)
        if detected is None:
            if file == "-":
                raise InputError("standard input: format not recognised; name it or give --map")
            if Path(file).is_dir():
                folders = " or ".join(each.name for each in formats().values() if each.folder)
                raise InputError(
                    f"{file}: no folder that auto knows by its files; give one file of it, or the "
                    f"name of its format ({folders}) in place of auto"
                )
            return mapped(guess(file))
        name = detected
    if name != FOREBAY:
        trace_format(name)  # an unknown name is an error even for an empty pipe
    return open_trace(file, format_name=name, options=options), name, None, []


def _show(
    reader: TraceReader, name: str, mapping: str | None, guessed: bool, as_json: bool
) -> None:
    """Print format, mapping and first rows, which proves that the file can be read."""
    rows = list(islice(reader, SHOWN_ROWS))
    reader.close()
    if as_json:
        shown = [orjson.loads(row_bytes(row)) for row in rows]
        print_json({"format": name, "map": mapping, "first": shown})
        return
    talk(f"format:  {name}")
    if mapping:
        how = "guessed; correct it with" if guessed else "given by"
        talk(f"columns, {how} --map:\n  {mapping.replace(',', chr(10) + '  ')}")
    talk(f"first {len(rows)} rows:")
    for row in rows:
        print(_shown_row(row))


def _shown_row(row: TraceRequest) -> str:
    line = row_bytes(row).decode().rstrip()
    return escaped(line if len(line) <= 400 else f"{line[:397]}...")


def _first_told(rows: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Pass rows on, and print the first row, so that a wrong guess is seen."""
    for index, row in enumerate(rows):
        if not index:
            talk(f"first row:  {_shown_row(row)}")
        yield row


def _tell_losses(reader: TraceReader) -> None:
    for words, counted in (("not requests", reader.ignored), ("note", reader.notes)):
        for why, count in Counter(counted).most_common(5):
            talk(f"{words}: {count:,} {why}")
    if reader.skipped:
        talk(f"{reader.skipped:,} bad rows skipped; the first: {reader.first_skipped}")


def export_trace(
    format_name: Annotated[
        str, typer.Argument(metavar="FORMAT", help="mooncake, aiperf, guidellm or csv")
    ],
    trace: TraceFile = "-",
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a trace in the format of another tool.

    example:  forebay traces export aiperf conversation.jsonl -o conversation_aiperf.jsonl
    """
    from forebay.traces.edit.export import export

    write = export(format_name)
    check_output(output, force=force, as_json=as_json)
    totals = Totals(open_trace(trace))
    with whole_file(output) as file:
        file.writelines(write(totals))
    if format_name == "guidellm":
        talk("guidellm's data has no times: set its rate yourself")
    facts = {**totals.as_dict(), "command": "export", "format": format_name, "trace": trace}
    print_result(facts, f"{totals.requests:,} requests{to_file(output)}", as_json)


def list_formats(as_json: AsJson = False) -> None:
    """List the formats that can be imported, also by plug-ins.

    example:  forebay traces formats
    """
    all_formats = formats().values()
    if as_json:
        about = ("name", "what", "keeps")
        print_json([{key: getattr(entry, key) for key in about} for entry in all_formats])
        return
    for entry in all_formats:
        print(f"{entry.name:<18} {entry.what}\n{'':<18} keeps: {entry.keeps}")


def fit_model(
    trace: TraceFile = "-",
    output: Output = "-",
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Fit a small model: rates, lengths, sharing, sessions and think times. No text is in it.

    example:  forebay traces fit conversation.jsonl -o model.json

    More traffic like it:  forebay traces synth model model.json --speed 2 -o twice.jsonl
    """
    from forebay.traces.synth.fit_model import fit
    from forebay.traces.synth.model import write_model

    check_output(output, force=force, as_json=as_json)
    model = fit(open_trace(trace), seed)
    with whole_file(output) as file:
        file.write(write_model(model))
    facts = {
        "requests": model.requests,
        "windows": len(model.profile),
        **{name: getattr(model, name) for name in ("window_s", "session_cv", "long_sessions")},
        **{"command": "fit", "trace": trace, "seed": seed},
    }
    line = (
        f"{model.requests:,} requests fitted: {len(model.profile)} windows of {model.window_s:,.0f}"
        f" s, CV of gaps {model.session_cv:g}, {model.long_sessions:,} long-lived sessions"
        f"{to_file(output)}"
    )
    print_result(facts, line, as_json)
