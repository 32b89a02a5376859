"""Read Parquet and Arrow files as rows, in pieces whose memory is bounded.

A small file of columns can unpack to gigabytes: a dictionary stores a long text once for thousands
of rows, and a run of equal numbers needs one byte. So rows share the texts of a dictionary. A file
whose own metadata announces too many bytes or values is refused.
"""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final

from forebay.traces.reading.unpack import MOST_TIMES_LONGER, SURELY_SMALL_BYTES, printable_size
from forebay.traces.rows import SHAPE_ERRORS, FileFacts, RowError, SourceRow

MOST_COLUMNS: Final = 10_000
PARQUET: Final = b"PAR1"
ARROW: Final = b"ARROW1"
ARROW_STREAM: Final = b"\xff\xff\xff\xff"
PIECE_ROWS: Final = 4096
PIECE_BYTES: Final = 64 << 20
MOST_IN_PIPE_BYTES: Final = 1 << 30  # its index is at the end, so a pipe is read into memory
MOST_VALUES: Final = 100_000_000  # values in one column of one row group
MOST_IN_A_ROW: Final = 1_000  # values on average, where there are very many


def columnar_rows(file: BinaryIO, start: bytes, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    """Read the rows of a Parquet or Arrow file whose first bytes, `start`, were already read.

    Raises:
        RowError: the file is damaged, or would need too much memory.
    """
    from pyarrow import ArrowException

    kind = "Parquet" if start.startswith(PARQUET) else "Arrow"
    try:
        whole = _whole(file, start)
        batches = _parquet_batches(whole) if kind == "Parquet" else _arrow_batches(whole, start)
        number = 0
        for batch in batches:
            for values in _rows_of(batch):
                number += 1
                yield number, SourceRow(number, values, facts)
    # pyarrow raises OSError for a page that cannot be unpacked, the others for other damage.
    except (ArrowException, OSError, MemoryError, NotImplementedError, *SHAPE_ERRORS) as error:
        if isinstance(error, RowError):
            raise
        why = f"not {kind} that can be read ({' '.join(str(error).split())[:200]})"
        raise RowError(f"{why}; is the file whole?", fatal=True) from error


def column_names(path: str | Path) -> frozenset[str]:
    """Return the columns of a Parquet file, or no columns if it is damaged or another kind."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        names = read_schema(path).names
    except (ArrowException, OSError, MemoryError, NotImplementedError, *SHAPE_ERRORS):
        return frozenset()
    return frozenset(names if len(names) <= MOST_COLUMNS else ())


def _whole(file: BinaryIO, start: bytes) -> BinaryIO:
    """Return a file that can seek: `file` itself, or the content of a pipe in memory."""
    if file.seekable():
        file.seek(0)
        return file
    content = start + file.read(MOST_IN_PIPE_BYTES)
    if len(content) >= MOST_IN_PIPE_BYTES:
        raise RowError(
            f"over {printable_size(MOST_IN_PIPE_BYTES)} by a pipe, or packed; unpack it to a file",
            fatal=True,
        )
    return BytesIO(content)


def _parquet_batches(file: BinaryIO) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    about = ParquetFile(file).metadata
    check_columns(about.num_columns)
    shared, rows = _plan(about)
    file.seek(0)
    table = ParquetFile(file, read_dictionary=shared, pre_buffer=False)
    yield from table.iter_batches(batch_size=rows)


def _plan(about: Any) -> tuple[list[str], int]:
    """Find the columns to read as dictionaries, and the rows of a piece.

    A text stored as a difference from the text before (DELTA_BYTE_ARRAY) cannot be shared. It is
    at most as long as its column.
    """
    shared: set[str] = set()
    longest = 1
    for group in range(about.num_row_groups):
        row_group = about.row_group(group)
        for index in range(about.num_columns):
            column = row_group.column(index)
            # Refuse before a byte is read: the metadata has all sizes.
            unpacked, packed = column.total_uncompressed_size, column.total_compressed_size
            many = column.num_values > MOST_IN_A_ROW * max(row_group.num_rows, MOST_IN_A_ROW)
            if (
                unpacked > max(SURELY_SMALL_BYTES, MOST_TIMES_LONGER * packed)
                or column.num_values > MOST_VALUES
                or (many and column.num_values > MOST_VALUES // 10)
            ):
                raise RowError(
                    f"column {column.path_in_schema[:60]!r} takes {printable_size(unpacked)} with "
                    f"{column.num_values:,} values in one row group; write smaller row groups",
                    fatal=True,
                )
            # Share texts, and size the pieces by the longest value.
            kind = about.schema.column(index)
            if column.physical_type == "BYTE_ARRAY" and kind.logical_type.type != "DECIMAL":
                shared.add(column.path_in_schema)
            if "DELTA_BYTE_ARRAY" in column.encodings:
                longest = max(longest, unpacked)
            elif column.physical_type == "FIXED_LEN_BYTE_ARRAY":
                longest = max(longest, kind.length)
    return sorted(shared), max(1, min(PIECE_ROWS, PIECE_BYTES // longest))


def _arrow_batches(file: Any, start: bytes) -> Iterator[Any]:
    from pyarrow import ipc

    if start.startswith(ARROW_STREAM):
        stream = ipc.open_stream(file)
        check_columns(len(stream.schema))
        yield from stream
        return
    table = ipc.open_file(file)
    check_columns(len(table.schema))
    for index in range(table.num_record_batches):
        yield table.get_batch(index)


def check_columns(count: int) -> None:
    """Raise RowError for a table that is too wide."""
    if count > MOST_COLUMNS:
        raise RowError(f"{count:,} columns, over the limit of {MOST_COLUMNS:,}", fatal=True)


def _rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    for at in range(0, batch.num_rows, PIECE_ROWS):
        piece = batch.slice(at, PIECE_ROWS)
        columns = [_values(piece.column(index)) for index in range(len(names))]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


def _values(column: Any) -> list[Any]:
    """Return a column as Python values. Rows share the texts of a dictionary."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        used = column.indices.to_pylist()
        words = {at: _plain(column.dictionary[at]) for at in set(used) if at is not None}
        return [words.get(at) for at in used]
    readable = _readable(column.type)
    if readable != column.type:
        column = column.cast(readable, safe=False)
    values: list[Any] = column.to_pylist()
    return [_text(value) for value in values] if _is_binary(readable) else values


def _plain(word: Any) -> Any:
    value = word.as_py()
    return _text(value) if _is_binary(word.type) else value


def _text(value: Any) -> Any:
    """Decode texts of writers that do not mark them as UTF-8."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _is_binary(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _readable(kind: Any) -> Any:
    """Return the type whose values Python has: microseconds, and plain numbers for decimals."""
    import pyarrow

    types = pyarrow.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pyarrow.timestamp("us", tz=kind.tz)
    if types.is_decimal(kind):
        return pyarrow.int64() if kind.scale == 0 and kind.precision <= 18 else pyarrow.float64()
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_readable(field.type)) for field in kind])
    if types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_readable(kind.value_type)))
    if types.is_dictionary(kind):  # inside a list or an object
        return kind.value_type
    return kind
