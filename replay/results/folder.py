"""Write the folder of a run: files that get their names only when the run is over.

    latency.hlog      HdrHistogram interval log, one line a second and tag
    requests.parquet  one row for each request; until the end an Arrow stream, with the rows so far
    run.json          everything needed to repeat the run
    summary.json      results, written last, so that it marks a complete run
    answers.jsonl     the text of each complete answer, if requested
    metrics.parquet   the servers' /metrics each second, if requested; until the end such a stream

During the run they are named `*.partial`. If the process is killed, `requests.arrow.partial` has
the rows up to the last second but one, and `report` reads them. A folder that already has a run is
an error before any request is sent, and a failed run leaves the old run unchanged.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from operator import attrgetter
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, BinaryIO, Self, TextIO, get_args, get_type_hints

from forebay.replay.clock.virtual_loop import VirtualClockLoop
from forebay.replay.results.arrow_file import ArrowFile
from forebay.replay.results.row import Row
from forebay.replay.results.server_metrics import MetricsTable
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.whole_file import json_bytes

HLOG = "latency.hlog"
TABLE = "requests.parquet"
ROWS = "requests.arrow.partial"
RUN = "run.json"
SUMMARY = "summary.json"
FILES = (HLOG, TABLE, RUN, SUMMARY)
ANSWERS = "answers.jsonl"
METRICS = "metrics.parquet"
METRICS_ROWS = "metrics.arrow.partial"
OPTIONAL = (ANSWERS, METRICS)
GROUP_ROWS = 1_000
_TYPES: dict[type, str] = {str: "string", int: "int64", float: "float64", bool: "bool_"}
_VALUES = attrgetter(*Row.__slots__)
_DICTIONARY: Any = ["bucket", "tenant", "document", "outcome", "reason", "backend", "said"]


def check_folder(folder: Path, *, force: bool) -> None:
    """Raise InputError if `folder` cannot take a run. Creates nothing."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out: {folder} is a file; name a folder")
    if not force:
        for name in FILES:
            if (folder / name).exists():
                raise InputError(
                    f"--out: {folder} already holds a run ({name}); name another or give --force"
                )


def make_folder(folder: Path) -> None:
    """Make `folder` if it does not exist (InputError: it cannot be made)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: {folder} cannot be made ({error.strerror})") from error


class RunFolder:
    """The open files of a run, for `with`. Without `commit` it leaves no file behind.

    An OSError in the block becomes an InputError. Its usual cause is a full disk.
    """

    def __init__(
        self, folder: Path, *, force: bool = False, answers: bool = False, metrics: bool = False
    ) -> None:
        check_folder(folder, force=force)
        self.path = folder
        self.answers: BinaryIO | None = None
        self.metrics: MetricsTable | None = None
        self._files = ExitStack()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.hlog: TextIO = open(  # noqa: SIM115 - closed in `_discard`
                self._partial(HLOG), "w", encoding="utf-8", newline="\n", buffering=1
            )
            self._files.callback(self.hlog.close)
            self.table = TableWriter(self._partial(TABLE), folder / ROWS)
            self._files.callback(self.table.abandon)
            if answers:
                self.answers = open(self._partial(ANSWERS), "wb")  # noqa: SIM115 - as above
                self._files.callback(self.answers.close)
            if metrics:
                self.metrics = MetricsTable(self._partial(METRICS), folder / METRICS_ROWS)
                self._files.callback(self.metrics.abandon)
        except OSError as error:
            self._discard()
            raise _not_written(folder, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._discard()
        if isinstance(error, OSError):
            raise _not_written(self.path, error) from error

    def begin(self, run: dict[str, Any]) -> None:
        """Write how the run is made, for readers of a run whose process is killed."""
        self._partial(RUN).write_bytes(json_bytes(run))

    def commit(self, run: dict[str, Any], summary: dict[str, Any]) -> None:
        """Complete the files and give each its name."""
        self.hlog.close()
        self.table.close()
        self.begin(run)
        self._partial(SUMMARY).write_bytes(json_bytes(summary))
        (self.path / SUMMARY).unlink(missing_ok=True)  # never a new table next to an old summary
        for name in OPTIONAL:
            (self.path / name).unlink(missing_ok=True)
        for file in (self.answers, self.metrics):
            if file is not None:
                file.close()
        for name in (*FILES, *OPTIONAL):
            if name in FILES or self._partial(name).exists():
                os.replace(self._partial(name), self.path / name)

    def _discard(self) -> None:
        """Close and delete the files that have no name yet, so errors do not matter."""
        with suppress(OSError):
            self._files.close()
        streams = (self.path / ROWS, self.path / METRICS_ROWS)
        for path in (*map(self._partial, (*FILES, *OPTIONAL)), *streams):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _partial(self, name: str) -> Path:
        return self.path / f"{name}.partial"


def _not_written(folder: Path, error: OSError) -> InputError:
    reason = os.strerror(error.errno) if error.errno else error  # Arrow's own words are longer
    return InputError(f"--out: {folder} cannot be written ({reason})")


async def _turn() -> None:
    await asyncio.sleep(0)


class TableWriter(ArrowFile):
    """Writes the rows of requests."""

    def __init__(self, path: Path, stream: Path) -> None:
        import pyarrow

        self._rows: list[tuple[Any, ...]] = []
        fields = []
        for name, annotation in get_type_hints(Row).items():
            kinds = get_args(annotation) or (annotation,)
            arrow_type = getattr(pyarrow, _TYPES[kinds[0]])()
            fields.append(pyarrow.field(name, arrow_type, nullable=NoneType in kinds))
        dictionary = {"row_group_size": GROUP_ROWS, "use_dictionary": _DICTIONARY}
        super().__init__(path, stream, pyarrow.schema(fields), **dictionary)

    def add(self, row: Row) -> None:
        self._rows.append(_VALUES(row))

    async def write_rows(self, turn: Callable[[], Awaitable[None]] = _turn) -> None:
        """Write the rows so far, with a turn of the event loop after each column.

        Rows stay in memory until they are written. So a cancellation loses no row, and `close`
        writes them.
        """
        while rows := self._rows[:GROUP_ROWS]:
            columns = []
            for column in self._columns(rows):
                await turn()
                columns.append(column)
            await self._write_beside(columns)

    async def _write_beside(self, columns: list[Any]) -> None:
        """Write the first rows in a thread: while the disk is slow, no request could be sent."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualClockLoop):  # time would stand still
            self._write(columns)
            del self._rows[: len(columns[0])]
            return
        writing = loop.run_in_executor(None, self._write, columns)
        try:
            await asyncio.shield(writing)
        finally:  # a cancellation must leave no rows half written or to be written twice
            await writing
            del self._rows[: len(columns[0])]

    def close(self) -> None:
        if self._rows:
            self._write(list(self._columns(self._rows)))
            self._rows = []
        super().close()

    def _columns(self, rows: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        for values, field in zip(zip(*rows, strict=True), self._schema, strict=True):
            yield self._arrow.array(values, type=field.type)
