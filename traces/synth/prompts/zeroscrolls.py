"""Read ZeroSCROLLS tasks from the official zips, a directory or a .jsonl file.

Rows with one id (several reference answers in validation) become one sample. Strange indices, row
counts or conflicting duplicates are warnings, never errors, because the published files differ
between versions. The sha256 and the number of rows are recorded instead. Whole tasks are kept in
memory. The largest is about 150 MB. Sources: tau-nlp/zero_scrolls and Shaham et al., Findings of
EMNLP 2023.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from forebay.traces.ground.errors import InputError
from forebay.traces.reading.containers import MAX_LINE_BYTES
from forebay.traces.reading.jsonl import parse_object
from forebay.traces.reading.unpack import check_member, printable_size
from forebay.traces.rows import RowError

MOST_TASK_BYTES = 512 << 20  # three times the longest task, narrative_qa
SPLITS = ("test", "validation")

# Raised by zipfile for a file that is cut short, corrupt, encrypted or compressed in another way.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Task:
    """One of the ten tasks.

    Attributes:
        query: True if a row has a question, so that rows may share a document.
        rows: rows of the test split (Table 1 of the paper).
        max_new_tokens: most output tokens, as in the official API runner.
        summary: True for summarisation. The chat form of other tasks asks for no explanation.
    """

    query: bool
    rows: int
    max_new_tokens: int
    summary: bool = False


TASKS = {
    "gov_report": Task(False, 500, 1024, summary=True),
    "summ_screen_fd": Task(False, 337, 512, summary=True),
    "qmsum": Task(True, 281, 512, summary=True),
    "squality": Task(True, 260, 512, summary=True),
    "qasper": Task(True, 500, 128),
    "narrative_qa": Task(True, 500, 64),
    "quality": Task(True, 500, 10),
    "musique": Task(True, 500, 32),
    "space_digest": Task(False, 500, 36),
    "book_sum_sort": Task(False, 500, 256),
}


@dataclass(frozen=True, slots=True)
class ZeroScrollsSample:
    """One prompt. Indices are offsets in characters (code points) of `input`.

    Attributes:
        outputs: reference answers, empty in the test split.
        separator: text that replaces the rest of a document that is cut short.
        inner_starts: start of each inner document (musique, space_digest, book_sum_sort).
    """

    task: str
    id: str
    input: str
    document_start: int
    document_end: int
    query_start: int
    query_end: int
    separator: str
    inner_starts: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def document(self) -> str:
        return self.input[self.document_start : self.document_end]

    def document_sha256(self) -> str:
        """Return the hash of the document's text, by which samples are grouped."""
        return hashlib.sha256(self.document.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TaskFile:
    """One task as read: the samples in file order, and facts about the file.

    Attributes:
        path: the zip or .jsonl file, to which `sha256` belongs.
        rows: lines of the split, before rows with one id were merged.
        skipped: bad rows that were skipped.
    """

    task: str
    split: str
    path: str
    sha256: str
    rows: int
    skipped: int
    samples: tuple[ZeroScrollsSample, ...]
    warnings: tuple[str, ...]


def read_task(
    path: str | Path, *, task: str | None = None, split: str = "test", skip_bad: bool = False
) -> TaskFile:
    """Read one task from a zip, a directory (`TASK/` or holding SPLIT.jsonl) or a .jsonl file.

    `task` is needed only if the path does not name it.

    Raises:
        InputError: no such file or split, an unknown task, a bad row, or no row at all.
    """
    if split not in SPLITS:
        raise InputError(f"--split {split}: not a split; one of: {', '.join(SPLITS)}")
    place = Path(path)
    if not place.exists():
        raise InputError(f"{path}: no such file; check the path")
    if place.is_dir():
        place = _in_directory(place, task, split)
    try:
        if zipfile.is_zipfile(place):
            with zipfile.ZipFile(place) as archive:
                member = _member(archive, place, task, split)
                check_member(archive.getinfo(member), str(place), MOST_TASK_BYTES)
                with archive.open(member) as file:
                    return _read(place, file, PurePosixPath(member), task, split, skip_bad)
        if place.stat().st_size > MOST_TASK_BYTES:
            raise InputError(
                f"{place}: over the limit of {printable_size(MOST_TASK_BYTES)} for a task, which "
                "is kept in memory; check that it is the right file"
            )
        with open(place, "rb") as file:
            return _read(place, file, PurePosixPath(place.as_posix()), task, split, skip_bad)
    except OSError as error:
        raise InputError(f"{place}: cannot be read ({error.strerror or error})") from error
    except _DAMAGED as error:
        raise InputError(f"{place}: damaged zip ({error}); fetch it again") from error


def _in_directory(folder: Path, task: str | None, split: str) -> Path:
    inside = [folder / f"{split}.jsonl", folder / (task or "") / f"{split}.jsonl"]
    if task:
        inside.append(folder / f"{task}.zip")
    for place in inside:
        if place.is_file():
            return place
    tasks = [
        name for name in TASKS if (folder / name).is_dir() or (folder / f"{name}.zip").exists()
    ]
    hint = f"; name one of its tasks with --task: {', '.join(tasks)}" if tasks else ""
    raise InputError(f"{folder}: holds no {split}.jsonl{hint}")


def _member(archive: zipfile.ZipFile, path: Path, task: str | None, split: str) -> str:
    members = [name for name in archive.namelist() if name.endswith(f"{split}.jsonl")]
    if task:
        members = [name for name in members if PurePosixPath(name).parent.name in (task, "")]
    if len(members) != 1:
        names = ", ".join(members) or "none"
        raise InputError(f"{path}: needs one {split}.jsonl inside, has {names}; give --task")
    return members[0]


def _read(
    path: Path, file: Any, inner: PurePosixPath, task: str | None, split: str, skip_bad: bool
) -> TaskFile:
    name = _task_name(path, inner, task)
    samples: dict[str, ZeroScrollsSample] = {}
    # Joined at the end: adding to a tuple row by row needs quadratic time for rows with one id.
    outputs: dict[str, list[str]] = {}
    warnings: list[str] = []
    rows = skipped = 0
    label = str(path) if inner.as_posix() == path.as_posix() else f"{path}({inner})"
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
        if not line.strip():
            continue
        try:
            sample = _sample(name, line)
        except RowError as error:
            if not skip_bad:
                raise InputError(f"{label}:{number}: {error}") from error
            skipped += 1
            continue
        rows += 1
        if problem := _index_problem(sample):
            warnings.append(f"{label}:{number}: {problem}")
        first = samples.setdefault(sample.id, sample)
        outputs.setdefault(sample.id, []).extend(sample.outputs)
        if first.input != sample.input:
            warnings.append(
                f"{label}:{number}: id {sample.id!r} again with another input; kept the first"
            )
    # A wrong number of rows is only a warning: the published files differ.
    if not rows:
        raise InputError(f"{label}: no rows in this file; check that it is the right one")
    expected = TASKS[name].rows
    if split == "test" and rows != expected:
        warnings.append(f"{label}: {rows} rows, the paper's Table 1 has {expected}")
    with open(path, "rb") as whole:
        sha256 = hashlib.file_digest(whole, "sha256").hexdigest()
    return TaskFile(
        name,
        split,
        str(path),
        sha256,
        rows,
        skipped,
        tuple(replace(sample, outputs=tuple(outputs[sample.id])) for sample in samples.values()),
        tuple(warnings),
    )


def _task_name(path: Path, inner: PurePosixPath, task: str | None) -> str:
    names = (task,) if task else (inner.parent.name, path.stem, inner.stem)
    for name in names:
        if name in TASKS:
            return name
    wrong = f" ({task!r} is not one)" if task else ""
    raise InputError(f"{path}: unknown task{wrong}; give --task, one of: {', '.join(TASKS)}")


def _sample(task: str, line: bytes) -> ZeroScrollsSample:
    row = parse_object(line)
    separator = row.get("truncation_seperator", row.get("truncation_separator"))
    inner = row.get("inner_docs_start_indices") or []
    output = row.get("output")
    identity = row.get("id")
    if type(identity) is not str or type(row.get("input")) is not str:
        raise RowError("id and input must be strings; is this a ZeroSCROLLS file?")
    if separator is not None and type(separator) is not str:
        raise RowError("truncation_seperator is not a string")
    if not isinstance(inner, list) or any(type(index) is not int for index in inner):
        raise RowError("inner_docs_start_indices is not a list of whole numbers")
    if output is not None and type(output) is not str:
        raise RowError("output is neither a string nor null")
    return ZeroScrollsSample(
        task,
        identity,
        row["input"],
        _index(row, "document_start_index"),
        _index(row, "document_end_index"),
        _index(row, "query_start_index"),
        _index(row, "query_end_index"),
        separator or "",
        tuple(inner),
        () if output is None else (output,),
    )


def _index(row: dict[str, Any], key: str) -> int:
    value = row.get(key)
    if type(value) is not int:
        raise RowError(f"{key}: {value!r} is not a whole number")
    return value


def _index_problem(sample: ZeroScrollsSample) -> str | None:
    order = (
        0,
        sample.document_start,
        sample.document_end,
        sample.query_start,
        sample.query_end,
        len(sample.input),
    )
    if list(order) != sorted(order):
        return (
            f"indices out of order: document {order[1]}:{order[2]}, query {order[3]}:{order[4]}, "
            f"input {order[5]} characters"
        )
    outside = [
        start
        for start in sample.inner_starts
        if not sample.document_start <= start <= sample.document_end
    ]
    return f"inner document starts outside the document: {outside[0]}" if outside else None


def by_document(samples: Sequence[ZeroScrollsSample]) -> dict[str, list[ZeroScrollsSample]]:
    """Group samples by the sha256 of their document, both in order of first appearance."""
    groups: dict[str, list[ZeroScrollsSample]] = {}
    for sample in samples:
        groups.setdefault(sample.document_sha256(), []).append(sample)
    return groups
