"""Read agent sessions of kv-cache-tester and Weka from files, or from a folder of files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay.traces.errors import InputError
from forebay.traces.formats.head import Head
from forebay.traces.formats.readers.kv_cache_tester import interleaved, session_requests
from forebay.traces.formats.table import ReadOptions, TraceFormat
from forebay.traces.reading.containers import table_rows
from forebay.traces.reading.unpack import open_input
from forebay.traces.rows import SHAPE_ERRORS, FileFacts, RowError, SourceRow, shape_error
from forebay.traces.schema import TraceRequest

SUFFIXES = (".json", ".jsonl", ".parquet", ".gz", ".bz2", ".xz", ".zst")


def _sessions(path: Path, options: ReadOptions) -> Iterator[list[TraceRequest]]:
    files = sorted(file for file in path.glob("*") if file.suffix in SUFFIXES)
    if path.is_dir() and not files:
        raise InputError(f"{path}: holds no session ({', '.join(SUFFIXES)}); give their folder")
    number = 0
    for file in files or [path]:
        try:
            with open_input(str(file)) as opened:
                for line, row in table_rows(opened, FileFacts(path=str(file))):
                    try:
                        if isinstance(row, RowError):
                            raise row
                        yield session_requests(_plain(row), f"{file.stem}-{line}", number)
                        number += 1
                    except RowError as error:
                        raise InputError(f"{file}:{line}: {error}") from error
                    except SHAPE_ERRORS as error:
                        raise InputError(f"{file}:{line}: {shape_error(error)}") from error
        except RowError as error:
            raise InputError(f"{file}: {error}") from error
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror})") from error


def _plain(row: SourceRow) -> dict[str, Any]:
    return row.values


def _read(path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
    sessions = list(_sessions(path, options))
    if len(sessions) == 1:
        yield from sessions[0]
        return
    yield from interleaved(
        sessions,
        start_gap_s=options.session_gap_s,
        longest_gap_s=options.longest_pause_s,
        seed=options.seed,
    )


def _recognise(head: Head) -> bool:
    return head.has("block_size", "hash_id_scope")


FORMATS = (
    TraceFormat(
        name="kv-cache-tester",
        what="coding-agent sessions of kv-cache-tester and Weka: files, or a folder of them",
        keeps="blocks, sessions, parents, sub-agents, think times, models",
        recognise=_recognise,
        parser=lambda options: lambda row: None,
        folder=_read,
    ),
)
