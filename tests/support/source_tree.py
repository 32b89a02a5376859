"""The modules and rooms of the product, parsed once for all tests that look at them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paths import ROOT

FOLDERS = ("analysis", "proxy", "replay", "traces")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
ROOMS = sorted(path.parent for path in MODULES if path.name == "__init__.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    """Return the path of a module, a room or a page as the house writes it."""
    return str(path.relative_to(ROOT))


@cache
def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"))


@cache
def named_in(module: Path) -> tuple[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    named = ast.ClassDef | Function
    return tuple(node for node in ast.walk(tree_of(module)) if isinstance(node, named))


def classes_of(module: Path) -> Iterator[ast.ClassDef]:
    return (node for node in named_in(module) if isinstance(node, ast.ClassDef))


def functions_of(module: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in named_in(module) if isinstance(node, Function))


def methods_by_class() -> dict[str, int]:
    """Return the number of methods of each class."""
    return {
        f"{name_of(module)}:{node.lineno}: {node.name}": sum(
            isinstance(part, Function) for part in node.body
        )
        for module in MODULES
        for node in classes_of(module)
    }


@cache
def complexity_by_function() -> dict[str, int]:
    return {
        f"{name_of(module)}:{node.lineno}: {node.name}": _complexity_of(node)
        for module in MODULES
        for node in functions_of(module)
    }


def _complexity_of(function: ast.AST) -> int:
    """Decisions in a function, nested ones too, plus one (McCabe 1976; `and` and `or` count)."""
    decisions = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            decisions += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            decisions += 1 + len(node.ifs)
        elif isinstance(node, ast.match_case):
            decisions += 1
        else:
            branches = ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler
            decisions += isinstance(node, branches)
    return decisions


def modules_of(room: Path) -> list[str]:
    """Return the names of the modules in a room, without `__init__`."""
    return sorted(path.stem for path in room.glob("*.py") if path.stem != "__init__")


def rooms_of(room: Path) -> list[str]:
    """Return the names of the rooms in a room."""
    return sorted(path.parent.name for path in room.glob("*/__init__.py"))


def caption_of(room: Path) -> str:
    return ast.get_docstring(tree_of(room / "__init__.py")) or ""
