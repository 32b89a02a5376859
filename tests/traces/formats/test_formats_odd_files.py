"""Every reader, every magic number and odd cells: a trace, or one line that a terminal can show."""

import bz2
import gzip
import io
import json
import lzma
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from paths import TESTS

from forebay.traces.edit.describe import describe
from forebay.traces.formats import ReadOptions, detect, formats, open_trace
from forebay.traces.formats.columns import mapped_format
from forebay.traces.formats.guess import guess
from forebay.traces.ground.errors import InputError
from forebay.traces.reading.jsonl import write_trace
from forebay.traces.reading.unpack import FOREIGN, PACKED, ZIP

GOLDEN = TESTS / "traces" / "golden"
READERS = ("forebay", "guess", *formats())
MAGIC = [
    *(magic for _, magic, _ in PACKED), *ZIP, *(magic for magic, _ in FOREIGN),
    b"PAR1", b"PARE", b"ARROW1\0\0", b"\xff\xff\xff\xff", b"\xff\xfe", b"\xfe\xff",
    b"\xef\xbb\xbf", b"\0", b"\r", b"<html>", b"[", b"{", b'"', b"[" * 2000, b'{"a":' * 2000,
]  # fmt: skip
CELLS: tuple[Any, ...] = (
    float("nan"), float("inf"), 1e300, -1e300, -1, 0, 5, 10**400, 10**19, 0.5, True, None, "", "x",
    "NaN", "1e300", "-1", "9" * 5000, "\x1b[31m", "\ud800", "é" * 3, "<html>", "[1]", [], {}, [{}],
    [[[[1]]]], {"a": {"a": 1}},
)  # fmt: skip


def tried(path: Path, reader: str, out: Path) -> None:
    """Read, write and describe a file; raise what is neither a trace nor one line."""
    for skip_bad in (False, True):
        options = ReadOptions(tokens="estimate", duration_s=30.0, skip_bad=skip_bad)
        try:
            if reader == "guess":
                requests = list(mapped_format(guess(path)).open(path, options))
            else:
                requests = list(open_trace(path, format_name=reader, options=options))
            write_trace(out, requests)
            describe(requests)
        except InputError as error:
            said = str(error).replace(str(path), "FILE")
            assert said.isprintable(), said
            assert len(said) < 800, said


def golden(reader: str, folder: Path) -> Path:
    """Copy the golden file of a reader to `folder`, with the other files of its folder."""
    name = {"forebay": "azure.expected", "guess": "litellm"}.get(reader, reader)
    (source,) = (
        path for path in GOLDEN.glob(f"{name}*") if path.name.removesuffix(path.suffix) == name
    )
    for file in source.iterdir() if source.is_dir() else [source]:
        shutil.copy(file, folder)
    return folder / ("chunk-1-trace.csv" if source.is_dir() else source.name)


@pytest.mark.parametrize("reader", READERS)
def test_any_first_bytes_are_a_trace_or_one_line(reader: str, tmp_path: Path) -> None:
    dice = Random(reader)
    content = golden(reader, tmp_path).read_bytes()[:2000]
    path, out = tmp_path / "x.csv", tmp_path / "t.jsonl"
    for magic in MAGIC:
        for rest in (b"", dice.randbytes(dice.randint(1, 300)), content):
            path.write_bytes(magic + rest)
            detect(path)
            tried(path, reader, out)


def zipped(content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", content)
    return sink.getvalue()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zipped])
def test_a_damaged_packed_file_is_a_trace_or_one_line(pack: Any, tmp_path: Path) -> None:
    dice = Random(str(pack.__name__))
    packed = pack((GOLDEN / "azure.csv").read_bytes() * 3)
    path, out = tmp_path / "x", tmp_path / "t.jsonl"
    for _ in range(60):
        data = bytearray(packed)
        for _ in range(dice.randint(1, 5)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data[: dice.choice([len(data), dice.randrange(len(data))])])
        detect(path)
        tried(path, "azure", out)


def test_a_damaged_parquet_file_is_a_trace_or_one_line(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"ts": [float(n) for n in range(300)], "prompt_tokens": [5] * 300,
                           "answer_tokens": [7] * 300, "team": ["a\rb"] * 300})  # fmt: skip
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    dice = Random(1)
    path, out = tmp_path / "x.parquet", tmp_path / "t.jsonl"
    for _ in range(60):
        data = bytearray(sink.getvalue())
        for _ in range(dice.randint(1, 6)):
            data[dice.randrange(4, len(data))] = dice.randrange(256)
        path.write_bytes(data)
        tried(path, "guess", out)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def odd_json(content: bytes, dice: Random, cell: Any) -> bytes:
    text = content.decode()
    try:
        rows = [json.loads(line) for line in text.splitlines()]
    except json.JSONDecodeError:
        rows = [json.loads(text)]
    holder, key = dice.choice([place for row in rows for place in places(row)])
    holder[key] = cell
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def odd_text(content: bytes, dice: Random, cell: Any) -> bytes:
    lines = [line.split(",") for line in content.decode().splitlines()]
    line = dice.choice(lines[1:] or lines)
    line[dice.randrange(len(line))] = cell if isinstance(cell, str) else json.dumps(cell)
    return "\n".join(",".join(line) for line in lines).encode("utf-8", "surrogatepass")


def odd_bytes(content: bytes, dice: Random, cell: Any) -> bytes:
    """Lose, double or replace a few bytes."""
    data = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data))
        put = dice.choice([b"", b"-", b"9", b'"', b"null", b"{}", b"[]", b"\xff", b"\n"])
        data[at : at + dice.choice([0, 1, 8])] = put
    return bytes(data)


@pytest.mark.parametrize("reader", READERS)
def test_odd_cells_and_bytes_are_a_trace_or_one_line(reader: str, tmp_path: Path) -> None:
    dice = Random(reader)
    path, out = golden(reader, tmp_path), tmp_path / "t.jsonl"
    content = path.read_bytes()
    for odd in (odd_json if ".json" in path.name else odd_text, odd_bytes):
        for cell in CELLS * 2:
            path.write_bytes(odd(content, dice, cell))
            tried(path, reader, out)
