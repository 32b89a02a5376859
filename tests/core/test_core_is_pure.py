"""The core imports nothing that reads a clock, a socket, a file or a random source."""

import ast
from pathlib import Path

import pytest
from paths import ROOT

CORE = ROOT / "proxy" / "core"
ALLOWED = {
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "__future__",
    "typing",
}


@pytest.mark.parametrize("module", sorted(CORE.rglob("*.py")), ids=lambda p: p.name)
def test_imports(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            assert name.startswith("forebay.proxy.core") or name.split(".")[0] in ALLOWED, name
