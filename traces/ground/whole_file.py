"""Write files completely or not at all, never over existing ones unless asked.

Next to a trace `T.jsonl`, `T.jsonl.meta.json` records the command's settings, seed and counts,
enough to make the trace again. A trace on standard output has no such file.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from forebay.traces.ground.errors import InputError


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that appears under `path` only when the block ends without an error.

    A reader never sees half of it, and an error leaves the old file unchanged. Standard output
    (`-`), pipes and devices are written to directly.

    Raises:
        InputError: the file cannot be written, for example because the disk is full.
    """
    if str(path) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(os.path.realpath(path))  # write to the target of a symbolic link
    if target.is_dir():
        raise InputError(f"{path}: is a directory; name the file to write")
    direct = is_stream(target)  # a rename cannot replace it
    written = target if direct else target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(written, "wb", buffering=-1 if direct else 1 << 20) as file:
            yield file
        if not direct:
            os.replace(written, target)
    except BaseException as error:
        if not direct:
            with suppress(OSError):
                written.unlink()
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise InputError(f"{path}: cannot be written ({error.strerror})") from error
        raise


def is_stream(path: str | Path) -> bool:
    """True if `path` is standard output (`-`), a pipe or a device."""
    return str(path) == "-" or (Path(path).exists() and not Path(path).is_file())


def meta_path(trace: str) -> Path:
    return Path(f"{trace}.meta.json")


def answers_path(trace: str) -> Path:
    return Path(f"{trace}.answers.jsonl")


def refuse_existing(paths: Iterable[str | Path], *, force: bool) -> None:
    """Raise InputError for the first of `paths` that is already a file, unless `force`."""
    for path in paths:
        if str(path) == "-":
            continue
        if Path(path).is_file() and not force:
            raise InputError(f"{path}: already exists; name another file or add --force")
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise InputError(f"{path}: no such folder; make {folder} first")


def write_meta(trace: str, facts: dict[str, Any]) -> None:
    """Write `facts` next to `trace`, unless that is standard output, a pipe or a device."""
    if not is_stream(trace):
        with whole_file(meta_path(trace)) as file:
            file.write(json_bytes(facts))


def json_bytes(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
