"""Write a table that can be read at any time: an Arrow stream, which becomes Parquet at the end."""

from pathlib import Path
from typing import Any, BinaryIO


class ArrowFile:
    """Writes batches of rows. If the process is killed, the stream has all batches so far.

    A subclass collects the rows of a batch, and writes the last ones in `close`.

    Args:
        path: the Parquet file, which `close` writes.
        stream: the Arrow stream, which `close` deletes.
        schema: the columns.
        options: options of Arrow's `write_table`.
    """

    def __init__(self, path: Path, stream: Path, schema: Any, **options: Any) -> None:
        import pyarrow
        import pyarrow.parquet

        self._schema = schema
        self._arrow: Any = pyarrow
        self._path, self._stream_path, self._options = path, stream, options
        path.touch()  # a folder that cannot be written is an error before the run
        self._file: BinaryIO = open(stream, "wb")  # noqa: SIM115 - closed in `abandon`
        self._writer: Any = pyarrow.ipc.new_stream(self._file, schema)

    def close(self) -> None:
        """Copy the stream, which is mapped into memory, to Parquet. A second call does nothing."""
        if self._writer is None:
            return
        self.abandon()
        with self._arrow.memory_map(str(self._stream_path)) as rows:
            table = self._arrow.ipc.open_stream(rows).read_all()
            self._arrow.parquet.write_table(
                table.unify_dictionaries(), str(self._path), compression="zstd", **self._options
            )
        self._stream_path.unlink()

    def abandon(self) -> None:
        """Close the stream."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._file:
                writer.close()

    def _write(self, columns: list[Any]) -> None:
        """Write rows, so that a reader finds them in the file."""
        self._writer.write_batch(self._arrow.record_batch(columns, schema=self._schema))
        self._file.flush()
