"""Define the table of trace formats, and choose a reader by name or by the file's first bytes.

A format is a function from a row to its requests, and a description (`row_format`). Forebay's
formats are in `readers`. A plug-in adds its own through the entry point group `forebay.traces`
(docs/reference/formats.md).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from sys import maxsize
from typing import Annotated, Any, BinaryIO, Final, NamedTuple

import typer

from forebay.traces.formats.head import Head, head_of, numbered_result
from forebay.traces.formats.totals import is_table, refuse_without_requests
from forebay.traces.ground.command_line.options import Seed, SkipBad, a_time
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.containers import Rows, table_rows, unpacked
from forebay.traces.reading.jsonl import read_trace
from forebay.traces.reading.reader import REORDER_ROWS, Order, Parsed, ParseRow, TraceReader
from forebay.traces.rows import UNITS, FileFacts, RowError, SourceRow
from forebay.traces.tokens import DEFAULT_ENCODING, TokenCounter, counter

FOREBAY: Final = "forebay"
GROUP: Final = "forebay.traces"
MODULES: Final = (
    *("published", "turns", "kv_cache_tester", "tracelab", "mlperf", "client_sets"),
    *("tools", "servers", "access_logs", "gateways", "prompts"),
)
CSV_COLUMNS: Final = ("id", "arrival_s", "input_tokens", "output_tokens", "session", "tenant",
                      "document", "service_class", "model", "status")  # fmt: skip
MODES: Final = ("auto", "cumulative", "delta")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Settings of a reader. A format uses some of them.

    A format has its own `block_tokens` if it is None. `tokens` counts text without counts.
    """

    sort: Annotated[
        bool, typer.Option("--sort", help="sort all rows by arrival (keeps them in memory)")
    ] = False
    skip_bad: SkipBad = False
    input_tokens: Annotated[int | None, typer.Option(help="prompt tokens of such a row")] = None
    output_tokens: Annotated[int | None, typer.Option(help="answer tokens of such a row")] = None
    block_tokens: Annotated[
        int | None, typer.Option(help="tokens of a block of hash_ids; default: the format's")
    ] = None
    time_unit: Annotated[
        str | None, typer.Option(help="mooncake, aiperf: s, ms, us or ns; default: ms")
    ] = None
    tokens: Annotated[
        str,
        typer.Option(
            "--tokens", "--tokenizer", help="encoding, model or tokenizer.json, or estimate"
        ),
    ] = DEFAULT_ENCODING
    mode: Annotated[
        str, typer.Option(help="a turn holds the history: auto, cumulative or delta")
    ] = "auto"
    session_gap_s: Annotated[
        float, a_time("mean time between starts of sessions", "--session-gap")
    ] = 30.0
    longest_pause_s: Annotated[
        float, a_time("longer pauses in sessions are cut to this", "--longest-pause")
    ] = 120.0
    start_s: Annotated[
        float | None, a_time("servegen: time of the files to begin at", "--start")
    ] = None
    duration_s: Annotated[float, a_time("servegen: traffic to make", "--duration")] = 600.0
    seed: Seed = 0

    @property
    def counter(self) -> TokenCounter:
        return _counter(self.tokens)


_counter = cache(counter)
DEFAULTS: Final = ReadOptions()


class MeasuredRequest(NamedTuple):
    """How a load test's request was answered. Times are seconds, points in time of any origin.

    Attributes:
        due_s: when it was to be sent, or else when it was sent.
        wait_s: how much later it was sent, None if the file does not say.
        input_tokens, output_tokens: lengths of prompt and answer, None if not known.
        ttft_s, e2e_s: seconds after sending, of the first and the last token. A request without
            `e2e_s` failed.
        stall_s: the longest gap between two events of the answer.
    """

    due_s: float
    wait_s: float | None
    input_tokens: int
    output_tokens: int | None
    ttft_s: float | None
    e2e_s: float | None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """A format that Forebay reads.

    Attributes:
        name: the name on the command line.
        what: one line about the file, for the table in the docs.
        keeps: the parts of a request that are kept, apart from times and lengths.
        recognise: True if a head is of this format. The first such format of the table wins.
        parser: makes the function from one row to its requests. `row_format` writes it.
        unpack: splits a document into rows.
        rows: the function that cuts the file into rows.
        order: times count from any origin unless `rebase` is False, and rows are in order of
            arrival unless rows are held back to sort them.
        served: reads the answer to a row's request, if the file is the result of a load test.
        own_ids: True if ids are from the file, so an id may occur twice.
        folder: reads a file or a folder by itself, in place of `parser`.
    """

    name: str
    what: str
    keeps: str = ""
    recognise: Callable[[Head], bool]
    parser: Callable[[ReadOptions], ParseRow] = lambda options: lambda row: None
    unpack: Callable[[dict[str, Any]], Iterable[dict[str, Any]]] | None = None
    rows: Rows = table_rows
    served: Callable[[SourceRow], MeasuredRequest] | None = None
    order: Order = field(default=Order(rebase=True))
    own_ids: bool = False
    folder: Callable[[Path, ReadOptions], Iterator[TraceRequest]] | None = None

    def open(self, path: str | Path, options: ReadOptions = DEFAULTS) -> TraceReader:
        """Open `path` as a stream of requests, `FILE#2` as the second result in a file.

        `TraceReader` lists the errors.
        """
        if options.mode not in MODES:
            raise InputError(f"--mode {options.mode}: not known; one of: {', '.join(MODES)}")
        if options.time_unit not in (None, *UNITS):
            raise InputError(f"--time-unit {options.time_unit}: give one of {', '.join(UNITS)}")
        path, result = numbered_result(path)
        if result is not None and self.served is None:
            raise InputError(f"{path}#{result}: {self.name} has no results to choose from")
        # A file of another kind gets a hint in its first error.
        doubt, head = "", head_of(path)
        if head.line and not self.recognise(head):
            doubt = (
                f"; the file does not look like {self.name}: traces import auto finds the format"
            )
        if self.folder is not None:
            if not Path(path).exists():
                raise InputError(f"{path}: no such file or folder; check the path")
            return FolderReader(path, self.folder(Path(path), options), doubt)
        # Else the reader streams rows.
        return TraceReader(
            path,
            self.parser(options),
            rows=partial(self._unpacked_rows, result),
            skip_bad=options.skip_bad,
            order=Order(self.order.rebase, maxsize) if options.sort else self.order,
            own_ids=self.own_ids,
            doubt=doubt,
        )

    def _unpacked_rows(
        self, result: int | None, file: BinaryIO, facts: FileFacts
    ) -> Iterator[tuple[int, Any]]:
        rows = self.rows(file, facts)
        if self.unpack is not None:
            rows = unpacked(rows, self.unpack, facts)
        return rows if result is None else self._one_result(rows, result)

    def _one_result(
        self, rows: Iterable[tuple[int, Any]], result: int
    ) -> Iterator[tuple[int, Any]]:
        """Yield the rows of one result of the file. A document, or a part of it, is a result."""
        places: dict[tuple[int, Any], int] = {}
        for number, row in rows:
            if isinstance(row, RowError):
                yield number, row
                continue
            key = 0 if self.unpack is None else number, row.get("result")
            if places.setdefault(key, len(places) + 1) == result:
                yield number, row
        if result > len(places):
            raise RowError(f"#{result}: the file holds {len(places)} results, from #1", fatal=True)


RowReader = Callable[[SourceRow, ReadOptions], Parsed]


def row_format(**description: Any) -> Callable[[RowReader], TraceFormat]:
    """Make a format of the decorated function, which reads one row.

    It stores values for later rows of the file in `row.facts`. The arguments are the attributes of
    `TraceFormat`.
    """

    def decorate(read: RowReader) -> TraceFormat:
        return TraceFormat(parser=lambda options: lambda row: read(row, options), **description)

    return decorate


class FolderReader(TraceReader):
    """A reader over the requests of a folder of files."""

    def __init__(self, path: str | Path, requests: Iterator[TraceRequest], doubt: str) -> None:
        self._found = requests
        super().__init__("-", lambda _: None, doubt=doubt)
        self.path = str(path)
        self._requests = self._counted()

    def _counted(self) -> Any:
        try:
            for request in self._found:
                self.rows += 1
                yield request
        except InputError as error:
            if self.rows or not self._doubt:
                raise
            raise InputError(f"{error}{self._doubt}") from error
        if not self.rows:
            raise InputError(f"{self.path}: no requests in this folder")


COMPLETION: Final = Order(rebase=True, held=REORDER_ROWS)
"""The order of a log whose lines are written when requests end."""


@cache
def formats() -> dict[str, TraceFormat]:
    """Return all formats by name, with the formats of plug-ins last.

    Raises:
        InputError: a plug-in cannot be loaded, or uses a name that is taken.
    """
    by_name: dict[str, TraceFormat] = {}
    for module in MODULES:
        values = vars(import_module(f"forebay.traces.formats.readers.{module}")).values()
        by_name |= {value.name: value for value in values if isinstance(value, TraceFormat)}
    for entry in entry_points(group=GROUP):
        try:
            added = entry.load()
        except Exception as error:  # a plug-in may raise any error
            raise InputError(
                f"trace format plug-in {entry.name} ({entry.value}) cannot be loaded: {error}; "
                "fix or uninstall it"
            ) from error
        if not isinstance(added, TraceFormat) or added.name in (*by_name, FOREBAY):
            raise InputError(
                f"trace format plug-in {entry.name} ({entry.value}) is not a TraceFormat with a "
                "name of its own; fix or uninstall it"
            )
        by_name[added.name] = added
    return by_name


def names() -> tuple[str, ...]:
    return (FOREBAY, *formats())


def trace_format(name: str) -> TraceFormat:
    """Return the format called `name` (InputError: unknown, with the list of names)."""
    if name not in formats():
        raise InputError(f"no trace format {name!r}; one of: {', '.join(formats())}, or auto")
    return formats()[name]


def detect(path: str | Path) -> str | None:
    """Detect the format of `path` by its first bytes or, for a folder, its first file.

    Returns None if no format recognises it. Standard input (`-`) is only peeked at.
    """
    if Path(path).is_dir():
        files = sorted(file for file in Path(path).iterdir() if file.is_file())
        format_names = [detect(file) for file in files[:20]]
        return next((name for name in format_names if name and formats()[name].folder), None)
    head = head_of(numbered_result(path)[0])
    if head.line[:1] == "{" and head.has("id", "arrival_s", "input_tokens"):
        return FOREBAY
    return next(
        (candidate.name for candidate in formats().values() if candidate.recognise(head)), None
    )


def open_trace(
    path: str | Path,
    *,
    format_name: str | None = None,
    skip_bad: bool = False,
    options: ReadOptions | None = None,
) -> TraceReader:
    """Open a trace in the named format, or in the format that `detect` returns.

    A file that no format recognises is read as Forebay's own, whose reader reports the error.
    """
    name, doubt = format_name or detect(path), ""
    if name is None:
        refuse_without_requests(path)
        head = head_of(path)
        if is_table(head):
            raise InputError(f"{path}: a table; traces import auto makes a trace of a table")
        name, doubt = FOREBAY, "; traces import auto makes a trace of a table"
        if head.has("prompt"):
            doubt = "; traces import prompts makes a trace of prompts without times"
    if name == FOREBAY:
        sort = options is not None and options.sort
        skip_bad = skip_bad or bool(options and options.skip_bad)
        return read_trace(path, skip_bad=skip_bad, sort=sort, doubt=doubt)
    return trace_format(name).open(path, options or ReadOptions(skip_bad=skip_bad))
