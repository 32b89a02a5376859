"""The code keeps the shape that lets a stranger read it: small modules, one name for one thing.

Each rule has a limit below; a change that breaks one is better cut differently than excused.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from paths import ROOT
from source_tree import (
    MODULES,
    classes_of,
    complexity_by_function,
    functions_of,
    lines_of,
    methods_by_class,
    name_of,
    tree_of,
)

pytestmark = pytest.mark.timeout(600)  # one test parses all modules, on a machine that may be busy
CORE = sorted((ROOT / "proxy" / "core").rglob("*.py"))
MODULE_LINES = 400
CLASS_METHODS = 25
COMPLEXITY = 15
STEP_LINES = 25  # of a body that needs no comments
CORE_MODULES = 42
CORE_CONSTANTS = 64  # each is measured, or a bound of memory


def assigned_in(module: Path) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets and values set at the top level; `A, B = 1, 2` sets two."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=True)
                else:
                    yield target, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def constants_of(module: Path) -> list[str]:
    """Names of numbers, and of tuples of numbers, that are set at the top level."""
    found = []
    for target, value in assigned_in(module):
        if not isinstance(target, ast.Name) or not target.id.isupper():
            continue
        inside = list(ast.walk(value))
        numbers = any(isinstance(n, ast.Constant) and type(n.value) in (int, float) for n in inside)
        words = any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in inside)
        if numbers and not words:
            found.append(target.id)
    return found


def test_a_module_is_short() -> None:
    lines = {name_of(module): lines_of(module) for module in MODULES}
    assert not {module: count for module, count in lines.items() if count > MODULE_LINES}


def test_a_class_is_small() -> None:
    methods = methods_by_class()
    assert not {name: count for name, count in methods.items() if count > CLASS_METHODS}


def test_a_function_decides_little() -> None:
    complexity = complexity_by_function()
    assert not {name: count for name, count in complexity.items() if count > COMPLEXITY}


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for module in MODULES:
        for node in classes_of(module):
            places[node.name].append(name_of(module))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_the_core_has_few_modules() -> None:
    assert len([path for path in CORE if path.name != "__init__.py"]) <= CORE_MODULES


def test_the_core_has_few_constants() -> None:
    found = [f"{name_of(path)}: {name}" for path in CORE for name in constants_of(path)]
    assert len(found) <= CORE_CONSTANTS, "\n".join(found)


def test_a_constant_of_the_core_has_one_meaning() -> None:
    places = defaultdict(list)
    for path in CORE:
        for name in constants_of(path):
            places[name].append(name_of(path))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def steps_of(module: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, statements, lines and comment lines of each body, without functions in it."""
    text = module.read_text().splitlines()
    functions = list(functions_of(module))
    for function in functions:
        body = function.body[1:] if ast.get_docstring(function) else function.body
        if not body:
            continue
        # A comment may stand above the first statement.
        own = set(range(body[0].lineno - 1, cast("int", function.end_lineno) + 1))
        for inner in ast.walk(function):
            if inner in functions and inner is not function:
                own -= set(range(inner.lineno, cast("int", inner.end_lineno) + 1))
        comments = sum(text[line - 1].lstrip().startswith("#") for line in own)
        name = f"{name_of(module)}:{function.lineno}: {function.name}"
        yield name, len(body), len(own) - 1, comments


def test_a_long_body_has_a_comment_before_each_step() -> None:
    """A body with at most three statements has one step, however long a table or a call is."""
    bodies = [body for module in MODULES for body in steps_of(module)]
    assert not [
        name
        for name, statements, lines, comments in bodies
        if lines > STEP_LINES and statements > 3 and comments < 2
    ]
