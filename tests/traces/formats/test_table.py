"""Each format is recognised, and a small file of its published shape gives the golden trace.

`--write-golden` writes the expected traces again; look at the difference before you commit it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from paths import TESTS

from forebay.traces.errors import InputError
from forebay.traces.formats import ReadOptions, detect, formats, open_trace
from forebay.traces.reading.jsonl import read_trace, write_trace

GOLDEN = TESTS / "traces" / "golden"
OPTIONS = ReadOptions(tokens="estimate", duration_s=60.0)
INPUTS = sorted(one for one in GOLDEN.iterdir() if not one.name.endswith(".expected.jsonl"))


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.name)
def test_a_file_is_recognised_and_gives_the_golden_trace(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = path.stem
    assert detect(path) == name
    golden = GOLDEN / f"{name}.expected.jsonl"
    write_trace(tmp_path / "t", open_trace(path, format_name=name, options=OPTIONS))
    if request.config.getoption("write_golden"):
        golden.write_bytes((tmp_path / "t").read_bytes())
    assert (tmp_path / "t").read_bytes() == golden.read_bytes()
    assert list(read_trace(golden)) == list(read_trace(tmp_path / "t"))


def test_every_format_has_a_golden_file() -> None:
    assert {one.stem for one in INPUTS} == set(formats())


VALUES: tuple[Any, ...] = (
    None,
    True,
    5,
    -1,
    0.5,
    1e300,
    10**30,
    "",
    "x",
    "<html>",
    [],
    {},
    [1],
    [{}],
    {"a": 1},
    "[1]",
)


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """List every place in a JSON value, as its container and key."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from nodes(value[key])


def damaged_bytes(content: bytes, dice: Random) -> bytes:
    """Lose, double or replace a few bytes."""
    data = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data))
        put = dice.choice([b"", b"-", b"9", b'"', b"null", b"{}", b"[]", b"\xff", b"\n"])
        data[at : at + dice.choice([0, 1, 8])] = put
    return bytes(data)


def damaged_values(content: bytes, dice: Random) -> bytes:
    """Replace one value of a JSON file by one of another type."""
    text = content.decode()
    try:
        rows = [json.loads(line) for line in text.splitlines()]
    except json.JSONDecodeError:
        rows = [json.loads(text)]
    holder, key = dice.choice([node for row in rows for node in nodes(row)])
    holder[key] = dice.choice(VALUES)
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.name)
def test_a_damaged_file_is_a_trace_or_one_line(path: Path, tmp_path: Path) -> None:
    """Nothing but InputError may come of damage."""
    files = [*path.iterdir()] if path.is_dir() else [path]
    for one in files:
        (tmp_path / one.name).write_bytes(one.read_bytes())
    source = next(file for file in files if "dataset" not in file.name)
    content, target = source.read_bytes(), tmp_path / source.name
    dice = Random(path.name)
    ways = [damaged_bytes, damaged_values] if ".json" in path.name else [damaged_bytes]
    for number in range(80):
        target.write_bytes(ways[number % len(ways)](content, dice))
        for skip_bad in (False, True):
            options = ReadOptions(tokens="estimate", duration_s=60.0, skip_bad=skip_bad)
            said = ""
            try:
                list(open_trace(target, format_name=path.stem, options=options))
            except InputError as error:
                said = str(error)
            assert "\n" not in said
