"""Where results of `forebay traces` go: files appear whole, nothing is overwritten unasked, and a
made trace says how it was made.

Beside a trace `T.jsonl` stands `T.jsonl.meta.json`: the command's settings, seed and counts, enough
to make it again. A trace written to standard output has none.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from forebay.traces.errors import InputError


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write that appears under `path` only when the block ends well.

    A reader never sees half of it, and an error on the way leaves what was there before. `-` is
    standard output, which, like a pipe or a device, is written to as it comes.
    """
    if str(path) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(os.path.realpath(path))  # keep a symbolic link a link
    if target.is_dir():
        raise InputError(f"{path}: is a directory; name the file to write")
    if target.exists() and not target.is_file():  # cannot be renamed over
        with open(target, "wb") as file:
            yield file
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb", buffering=1 << 20) as file:
            yield file
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise InputError(f"{path}: cannot be written ({error.strerror})") from error
        raise


def meta_path(trace: str) -> Path:
    return Path(f"{trace}.meta.json")


def answers_path(trace: str) -> Path:
    return Path(f"{trace}.answers.jsonl")


def refuse_existing(paths: Iterable[str | Path], *, force: bool) -> None:
    """InputError for the first of `paths` that is already a file, unless `force`."""
    for path in paths:
        if str(path) == "-":
            continue
        if Path(path).is_file() and not force:
            raise InputError(f"{path}: already exists; name another file or add --force")
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise InputError(f"{path}: no such folder; make {folder} first")


def write_meta(trace: str, facts: dict[str, Any]) -> None:
    """Write `facts` beside `trace`; nothing for standard output, a pipe or a device."""
    if trace != "-" and Path(trace).is_file():
        with whole_file(meta_path(trace)) as file:
            file.write(json_bytes(facts))


def json_bytes(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
