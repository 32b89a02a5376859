"""Read run folders (`summary.json`, `run.json`, `requests.parquet`) and files as runs.

Nothing is computed or written here. A file that is missing, damaged or not part of the run is an
InputError that names the file and the fix.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.analysis.runs.run import (
    NEEDED,
    NO_BUCKET,
    NUMBERS,
    OUTCOMES,
    WORDS,
    RunData,
    Words,
    folder_name,
)
from forebay.analysis.runs.window import Cut, cut_run
from forebay.analysis.statistics.quantiles import Floats
from forebay.analysis.statistics.units import is_text, printable
from forebay.replay.results.folder import ROWS, SUMMARY
from forebay.traces.formats.head import numbered_result
from forebay.traces.ground.errors import InputError, reading
from forebay.traces.reading.containers import MAX_LINE_BYTES, json_value

if TYPE_CHECKING:
    import pyarrow as pa


def load_run(path: Path, name: str | None = None, unit: str | None = None) -> RunData:
    """Read a run folder, or a file: of another load generator, of the proxy, or of histograms.

    `FILE#2` is the second result in a file that holds several.

    Args:
        unit: ns, us, ms or s: of the values of a histogram file that does not state it.

    Raises:
        InputError: the folder is missing or not named in UTF-8, or a file is missing, damaged or
            not part of a run.
    """
    if not is_text(str(path)):
        raise InputError(f"{printable(str(path))}: its name is not UTF-8; rename it")
    whole, number = numbered_result(path)
    if whole.is_file():
        return _load_file(whole, name or folder_name(path), number, unit)
    if not path.is_dir():
        raise InputError(f"{path}: not there; give a run folder, as `forebay replay --out` writes")
    if (path / ROWS).exists() and not (path / SUMMARY).exists():
        return _unfinished(path, name or folder_name(path))
    summary = read_json(path / "summary.json")
    info = read_json(path / "run.json")
    numbers, words = _columns(path / "requests.parquet")
    run = RunData(path, name or folder_name(path), summary, info, numbers, words)
    reported = summary.get("requests")
    if type(reported) is not int:
        raise InputError(f"{path / 'summary.json'}: has no number of requests; repeat the run")
    if reported != run.requests:
        raise InputError(
            f"{path / 'summary.json'}: counts {reported:,} requests, but requests.parquet has "
            f"{run.requests:,}; they are not of one run: repeat it"
        )
    return run


def _unfinished(path: Path, name: str) -> RunData:
    """Read the rows of a run that was killed, or is not over yet."""
    import pyarrow as pa

    from forebay.analysis.runs.sources.rows import row_summary

    file = path / ROWS
    batches: list[pa.RecordBatch] = []
    with (
        suppress(pa.ArrowException, OSError),  # the last rows may be cut
        pa.memory_map(str(file)) as rows,
        pa.ipc.open_stream(rows) as stream,
    ):
        batches.extend(stream)
    if not batches:
        raise InputError(f"{file}: no request had ended; repeat the run")
    numbers, words = _arrays(file, pa.Table.from_batches(batches))
    info = read_json(path / "run.json.partial")
    why = f"it did not finish: {len(words['outcome']):,} requests had ended"
    judged = {"verdict": "interrupted", "verdict_reason": why, "ended": "killed"}
    return RunData(path, name, row_summary(numbers, words) | judged, info, numbers, words)


def _load_file(path: Path, name: str, number: int | None, unit: str | None) -> RunData:
    """Read a file that is recognised by its first bytes."""
    # The readers of files are imported here: a run folder needs none of them.
    from forebay.analysis.runs.other_tools import load_result
    from forebay.analysis.runs.sources.proxy_logs import is_proxy_log, load_proxy_log
    from forebay.traces.formats import head_of
    from forebay.traces.formats.totals import HGRM

    head = head_of(path)
    if is_proxy_log(head.first):
        return load_proxy_log(path, name)
    # A log of histograms begins with a comment or its legend. wrk2 prints words before its table.
    log = path.suffix in (".hlog", ".hgrm") or head.line.startswith(("#", '"'))
    if log or HGRM.match(head.line):
        from forebay.analysis.runs.sources.histograms import load_histograms

        return load_histograms(path, name, unit)
    return load_result(path, name, number)


def load_runs(
    paths: Sequence[Path], cuts: Sequence[Cut] = (), unit: str | None = None
) -> list[RunData]:
    """Read several runs and give each a unique name.

    Args:
        cuts: parts of the runs' time to keep. A single part counts for all runs. As many parts as
            runs are applied one to one, and several parts of a single run make a run of each.
    """
    if len(paths) == 1 and len(cuts) > 1:
        whole = load_run(paths[0], unit=unit)
        return [cut_run(whole, cut, f"{whole.name} {cut.text}") for cut in cuts]
    if len(cuts) not in (0, 1, len(paths)):
        raise InputError(
            f"--between: {len(cuts)} windows for {len(paths)} runs; give one, or one for each"
        )
    runs = [load_run(path, unit=unit) for path in paths]
    if cuts:
        of_each = list(cuts) * len(runs) if len(cuts) == 1 else cuts
        runs = [cut_run(run, cut) for run, cut in zip(runs, of_each, strict=True)]
    return _named_apart(runs, paths)


def _named_apart(runs: list[RunData], paths: Sequence[Path]) -> list[RunData]:
    """Name runs by their parent folders too, or number them, if names are equal."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    parents = [printable(f"{path.resolve().parent.name}/{path.resolve().name}") for path in paths]
    if len(set(parents)) < len(parents):
        parents = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    return [replace(run, name=name) for run, name in zip(runs, parents, strict=True)]


def _check_file(file: Path) -> None:
    """Raise InputError if a file of a run is not there, or is a pipe or device without an end."""
    if not file.is_file():
        why = "no file but a pipe or device" if file.exists() else "missing"
        raise InputError(f"{file}: {why}; the run did not finish, or this is no run folder")


def read_json(file: Path) -> Mapping[str, Any]:
    """Read an object from a file of a folder (InputError: missing, damaged or no object)."""
    _check_file(file)
    try:
        with reading(file), open(file, "rb") as content:
            value = json_value(content.read(MAX_LINE_BYTES))
    except ValueError as error:
        raise InputError(f"{file}: damaged JSON ({error}); repeat the run") from error
    if not isinstance(value, dict):
        raise InputError(f"{file}: holds {type(value).__name__}, not an object; repeat the run")
    return value


def _columns(file: Path) -> tuple[dict[str, Floats], dict[str, Words]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check_file(file)
    try:
        there = set(pq.read_schema(file).names)
        # As dictionaries, equal words are read once.
        shared = [name for name in WORDS if name in there]
        with pq.ParquetFile(file, read_dictionary=shared) as parquet:
            if missing := sorted(NEEDED - there):
                raise InputError(
                    f"{file}: no column {', '.join(missing)}; not the requests of a forebay run"
                )
            table = parquet.read(columns=[name for name in (*NUMBERS, *WORDS) if name in there])
            table = table.unify_dictionaries()
    except (pa.ArrowException, OSError) as error:
        line = str(error).partition("\n")[0]
        raise InputError(f"{file}: damaged parquet ({line}); repeat the run") from error
    return _arrays(file, table)


def _arrays(file: Path, table: "pa.Table") -> tuple[dict[str, Floats], dict[str, Words]]:
    """Return the columns of a table. Older runs lack some, which are then NaN or empty."""
    import pyarrow as pa

    there = set(table.column_names)
    count = table.num_rows
    numbers, words = {}, {}
    for name in NUMBERS:
        values = np.full(count, np.nan)
        if name in there:
            try:
                values = table.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False)
            except pa.ArrowException as error:
                raise InputError(f"{file}: column {name} holds no numbers") from error
        numbers[name] = values
    for name in WORDS:
        empty = NO_BUCKET if name == "bucket" else ""
        if name not in there:
            words[name] = np.full(count, empty, dtype=object)
            continue
        # Equal words are cleaned once and share one string: a run may have a million requests.
        column = table.column(name).combine_chunks().dictionary_encode()
        cleaned = [
            empty if text is None else printable(str(text))
            for text in [*column.dictionary.to_pylist(), None]
        ]
        places = column.indices.fill_null(len(cleaned) - 1).to_numpy(zero_copy_only=False)
        words[name] = np.array(cleaned, dtype=object)[places]
    # An unknown outcome would be counted nowhere.
    if strange := sorted(set(words["outcome"].tolist()) - OUTCOMES):
        raise InputError(f"{file}: outcome {strange[0]!r}; one of: {', '.join(sorted(OUTCOMES))}")
    return numbers, words
