"""The tests that the tables of faults name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"\b(?:test_[a-z0-9_]+|Test[A-Z][A-Za-z]+)\b")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("faults*.md")), ids=lambda p: p.name)
def test_every_test_that_is_named_exists(page: Path) -> None:
    there = {path.stem for path in (ROOT / "tests").glob("*.py")}
    for path in (ROOT / "tests").glob("test_*.py"):
        there |= set(re.findall(r"(?:def|class) (\w+)", path.read_text()))
    named = set(NAME.findall(page.read_text())) - {"test_fault_client_", "test_fault_upstream_"}
    assert len(named) > 10
    assert not named - there
