"""Read the result of a load test: how each of its requests was answered."""

from collections.abc import Iterator
from pathlib import Path

from forebay.traces.formats.table import FOREBAY, MeasuredRequest, TraceFormat, detect, formats
from forebay.traces.ground.errors import InputError, reading
from forebay.traces.reading.containers import Rows, table_rows
from forebay.traces.reading.unpack import open_input
from forebay.traces.rows import (
    SHAPE_ERRORS,
    FileFacts,
    NotARequestError,
    RowError,
    SourceRow,
    shape_error,
)


def result_format(path: Path) -> TraceFormat | None:
    """Return the format of a load test's result, None for any other file."""
    name = detect(path)
    tool = None if name is None or name == FOREBAY else formats()[name]
    return tool if tool is not None and tool.served is not None else None


def served_results(
    path: Path, tool: TraceFormat, notes: list[str] | None = None
) -> dict[tuple[int, int | None], list[MeasuredRequest]]:
    """Read the requests of each result, by the number of its document and its own number in it."""
    results: dict[tuple[int, int | None], list[MeasuredRequest]] = {}
    assert tool.served is not None
    for document in file_rows(path, tool.rows, notes):
        number = 0 if tool.unpack is None else document.number
        try:
            for values in tool.unpack(document.values) if tool.unpack else [document.values]:
                row = document.with_values(values)
                try:
                    results.setdefault((number, row.get("result")), []).append(tool.served(row))
                except NotARequestError:
                    continue
        except RowError as error:
            raise InputError(f"{path}:{document.number}: {error}") from error
        except SHAPE_ERRORS as error:
            raise InputError(f"{path}:{document.number}: {shape_error(error)}") from error
    return {numbers: served for numbers, served in results.items() if served}


def file_rows(
    path: Path, rows: Rows = table_rows, notes: list[str] | None = None
) -> Iterator[SourceRow]:
    """Read the rows of a file, packed or not.

    A torn last line is left out and noted: the file is still written, or its writer was killed.

    Raises:
        InputError: the file cannot be read, or another line is damaged.
    """
    torn: InputError | None = None
    parsed = False
    try:
        with reading(path), open_input(str(path)) as file:
            for number, row in rows(file, FileFacts(path=str(path))):
                if torn is not None:
                    raise torn
                if isinstance(row, RowError):
                    torn = InputError(f"{path}:{number}: {row}")
                else:
                    parsed = True
                    yield row
    except RowError as error:
        raise InputError(f"{path}: {error}") from error
    if torn is not None and not parsed:
        raise torn
    if torn is not None and notes is not None:
        notes.append("the last line was not read, as it is cut")
