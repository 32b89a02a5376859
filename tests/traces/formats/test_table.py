"""Each format is recognised, and a small file of its published shape gives the golden trace.

`--write-golden` writes the expected traces again; look at the difference before you commit it.
"""

from pathlib import Path

import pytest
from paths import TESTS

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
