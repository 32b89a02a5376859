"""The result of a study: a sentence, a table, a plot, and the settings that repeat it."""

import csv
import io
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forebay.analysis.charts.files import plot_files
from forebay.analysis.statistics.units import FORMATS, NONE, durations, rates
from forebay.replay.results.folder import make_folder
from forebay.traces.ground.command_line.messages import talk
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.whole_file import whole_file

PLOT = "plot.svg"
FILES = ("results.json", "results.csv", "results.md", PLOT, "plot.png")
RUNS = "runs"  # subfolder with the replayed runs of a target given by URL


def _times(values: Sequence[float | None]) -> list[str]:
    """Durations with milliseconds even above 1 s: studies compare differences that small."""
    if max((v for v in values if v is not None), default=0.0) < 1.0:
        return durations(values)
    return [NONE if v is None else f"{v:,.3f} s" for v in values]


def _figures(values: Sequence[float | None]) -> list[str]:
    """Three significant digits each, for values of very different size."""
    return [NONE if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values]


_FORMATS = FORMATS | {"figure": _figures, "s": _times, "rate": rates}
Row = dict[str, Any]
ALWAYS, FILLED, VARIED = "always", "filled", "varied"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a study's table.

    Attributes:
        key: key of its values in the rows.
        kind: unit of its values: s, count, figure, rate, share, ratio or text.
        shown: False writes the column to the files but not to the terminal.
        when: `FILLED` leaves the column out where no row has a value, `VARIED` where all rows have
            the same.
    """

    key: str
    heading: str
    kind: str = "s"
    shown: bool = True
    when: str = ALWAYS

    def needed(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """True if a table of these rows has the column."""
        values = {row.get(self.key) for row in rows}
        if self.when == FILLED:
            return bool(values - {None, ""})
        return self.when == ALWAYS or len(values) > 1


@dataclass(frozen=True, slots=True)
class Result:
    """A finished study.

    Attributes:
        sentence: the conclusion.
        rows: the measurements, one value for each column key.
        facts: derived figures by name, in base units.
        plot: an SVG document.
        notes: sentences that a reader needs for the table.
    """

    study: str
    target: str
    sentence: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    plot: str
    notes: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "target": self.target,
            "sentence": self.sentence,
            "columns": [
                {"key": column.key, "heading": column.heading, "kind": column.kind}
                for column in self.columns
                if column.shown
            ],
            "rows": [dict(row) for row in self.rows],
            "facts": dict(self.facts),
            "notes": list(self.notes),
            **self.settings,
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"forebay": version("forebay"), "python": platform.python_version()},
        }


def doubted(words: str, notes: list[str], rows: Iterable[Mapping[str, Any]], *keys: str) -> str:
    """Add to `words` and `notes` which loads are not valid. `keys` name a row."""
    bad = [
        f"{' '.join(f'{row[k]:g}' if isinstance(row[k], float) else str(row[k]) for k in keys)} "
        f"({row['verdict']})"
        for row in rows
        if row["verdict"] != "valid"
    ]
    if not bad:
        return words
    notes.append(f"not valid: {', '.join(bad)}")
    return f"Not valid, because the load generator or an engine could not keep up: {words}"


def check_out(out: Path, force: bool) -> None:
    """Raise InputError if the results cannot be written to `out`. Creates nothing."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file; give a folder")
    for name in (*FILES, RUNS):
        if not force and (out / name).exists():
            raise InputError(f"--out {out}: already holds {name}; name another or give --force")


def finish(result: Result, out: Path, as_json: bool) -> None:
    """Write the files and print the result."""
    import orjson

    data = orjson.dumps(result.as_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    make_folder(out)
    files = {"results.json": data, "results.csv": _csv(result)}
    files |= {"results.md": markdown(result).encode(), **plot_files("plot", result.plot)}
    for name, content in files.items():
        with whole_file(out / name) as file:
            file.write(content)
    if as_json:
        sys.stdout.write(data.decode())
    else:
        _print(result, out)
    talk(f"wrote {out}: {', '.join(files)}")


def markdown(result: Result) -> str:
    """The sentence, the table and the notes of a result as Markdown, with the command."""
    shown = [column for column in result.columns if column.shown]
    parts = [f"> {result.sentence}", markdown_table(shown, result.rows)]
    parts += [f"- {note}" for note in result.notes]
    if "command" in result.settings:
        parts.append(f"`{result.settings['command']}`")
    return "\n\n".join(parts) + "\n"


def markdown_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table. Numbers are aligned right."""
    cells = _cells(columns, rows)
    rules = ["---" if column.kind == "text" else "--:" for column in columns]
    lines = [[column.heading for column in columns], rules, *zip(*cells, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _csv(result: Result) -> bytes:
    text = io.StringIO()
    keys = [column.key for column in result.columns]
    writer = csv.DictWriter(text, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(result.rows)
    return text.getvalue().encode()


def cells_of(column: Column, values: Sequence[Any]) -> list[str]:
    """The text of a column's values, all with the same unit and decimals."""
    if column.kind in _FORMATS:
        return list(_FORMATS[column.kind](values))
    return [str(NONE if value is None else value) for value in values]


def _cells(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [cells_of(column, [row.get(column.key) for row in rows]) for column in columns]


def _print(result: Result, out: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = [column for column in result.columns if column.shown]
    cells = _cells(columns, result.rows)
    whole = zip(columns, cells, strict=True)
    # Headings are broken at each space only if the table is wider than the terminal.
    crowded = sum(max(map(len, [column.heading, *of])) + 2 for column, of in whole) > console.width
    for column, of in zip(columns, cells, strict=True):
        # Headings and names may wrap between words, numbers must not.
        number = column.kind != "text"
        words = [*column.heading.split(), *(of if number else " ".join(of).split())]
        table.add_column(
            column.heading.replace(" ", "\n") if crowded else column.heading,
            justify="right" if number else "left",
            no_wrap=number,
            min_width=max(map(len, words)),
            overflow="fold",
        )
    for row in zip(*cells, strict=True):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    console.print(Text(result.sentence, style="bold"))
    for note in result.notes:
        console.print(Text(note, style="dim"))
    console.print(Text(f"plot: {out / PLOT}", style="dim"), soft_wrap=True)
    for key in ("command", "seed"):
        if key in result.settings:
            console.print(Text(f"{key}: {result.settings[key]}", style="dim"), soft_wrap=True)
