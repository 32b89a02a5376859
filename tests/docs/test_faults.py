"""The tables of faults name tests that exist, and every row has one."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT, TESTS

TABLES = sorted((ROOT / "docs" / "reference").glob("faults*.md"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NAME = re.compile(r"`((?:Test\w+::)?test_\w+|Test\w+)`")


def names_in(path: Path) -> set[str]:
    """`test_x`, `TestX::test_y` and `test_y` of one file."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            methods = [f.name for f in node.body if isinstance(f, FUNCTIONS)]
            names |= {node.name, *methods, *(f"{node.name}::{method}" for method in methods)}
        elif isinstance(node, FUNCTIONS):
            names.add(node.name)
    return names


@cache
def known_tests() -> set[str]:
    return {name for path in TESTS.rglob("test_*.py") for name in names_in(path)}


def rows(path: Path) -> list[str]:
    lines = [line for line in path.read_text("utf-8").splitlines() if line.startswith("|")]
    return [line for line in lines if not line.startswith(("|---", "| ---", "| fault |"))]


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.name)
def test_every_row_names_tests_that_exist(table: Path) -> None:
    known = known_tests()
    assert rows(table)
    for row in rows(table):
        cells = row.strip("| ").split(" | ")
        assert len(cells) == 3, row
        named = NAME.findall(cells[2])
        assert named or cells[2].strip() == "the same", row
        assert not (missing := [name for name in named if name not in known]), (missing, row)
