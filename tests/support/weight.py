"""The weight of the house: lines, modules, options and uses that tests/weight.json bounds.

`python tests/support/weight.py` prints the rooms of each product, for `make rooms`.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from pages.doc_reference import sections
from pages.exported_metrics import exported_metrics
from paths import ROOT, TESTS
from source_tree import (
    MODULES,
    ROOMS,
    caption_of,
    complexity_by_function,
    functions_of,
    lines_of,
    methods_by_class,
    modules_of,
    name_of,
    tree_of,
)
from walks import returns_by_walk

from forebay.proxy.cli import COMMANDS

FILE = TESTS / "weight.json"
ROUND = 100  # lines and words count in hundreds, so that a small repair leaves the file alone
CLOSE_LINES, CLOSE_METHODS, CLOSE_COMPLEXITY, FULL_ROOM = 380, 24, 14, 12
OPTION = re.compile(r"\b(?:typer\.(?:Option|Argument)|(?<!def )a_time)\((?!\*names)")
# Objects of PolicyState in the core. Its verbs in steps.py may reach into it.
STATE, STATE_MODULES = {"state", "_state"}, {"policy_state.py", "steps.py"}


def weights() -> dict[str, int]:
    """Return every figure that tests/weight.json bounds, by its name."""
    return {
        **{name: -(-size // ROUND) * ROUND for name, size in _sizes().items()},
        **_counts_by_product(),
        "configuration keys": sum(len(model.model_fields) for _, model in sections()),
        "metrics": sum(not metric.name.startswith("process_") for metric in exported_metrics()),
        **{f"{name} close to a limit": len(full) for name, full in close().items()},
        **_uses_of_the_policy_state(),
        **_uses_in_text(),
        "lines of the longest function": max(
            (node.end_lineno or 0) - node.lineno + 1
            for path in MODULES
            for node in functions_of(path)
        ),
        **returns_by_walk(),
    }


def product_of(path: Path) -> str:
    """Return the product of a module, a room or a test: the longest folder that has it decides."""
    name = name_of(path)
    above = [folder for folder in _folders() if name == folder or name.startswith(f"{folder}/")]
    return _folders()[max(above, key=len)]


def close() -> dict[str, list[str]]:
    """Return rooms, modules, classes and functions that are close to a limit of the house."""
    return {
        "rooms": [name_of(room) for room in ROOMS if len(modules_of(room)) >= FULL_ROOM],
        "modules": [name_of(path) for path in MODULES if lines_of(path) >= CLOSE_LINES],
        "classes": [name for name, size in methods_by_class().items() if size >= CLOSE_METHODS],
        "functions": [
            name for name, size in complexity_by_function().items() if size >= CLOSE_COMPLEXITY
        ],
    }


@cache
def _folders() -> dict[str, str]:
    """Return the product of each folder that tests/weight.json names."""
    folders = json.loads(FILE.read_text(encoding="utf-8"))["folders"]
    products = {name: product for product, names in folders.items() for name in names.split()}
    assert all((ROOT / name).is_dir() for name in products), products
    return products


def _sizes() -> dict[str, int]:
    """Return lines by product, for the source and for the tests, and words of the pages."""
    sizes: Counter[str] = Counter()
    for path in MODULES:
        sizes[f"{product_of(path)}: source lines"] += lines_of(path)
    for path in sorted(TESTS.rglob("*.py")):
        sizes[f"{product_of(path)}: test lines"] += lines_of(path)
    for page in (ROOT / "docs").rglob("*.md"):
        sizes["words of docs"] += len(page.read_text(encoding="utf-8").split())
    return sizes


def _counts_by_product() -> dict[str, int]:
    """Return modules, and options as users see them, by product."""
    counts: Counter[str] = Counter()
    for path in MODULES:
        counts[f"{product_of(path)}: modules"] += path.name != "__init__.py"
    for command in _commands():
        if command.callback is None:
            continue
        module = command.callback.__module__.removeprefix("forebay.").replace(".", "/")
        options = [param for param in command.params if param.param_type_name == "option"]
        counts[f"{product_of(ROOT / f'{module}.py')}: options"] += sum(
            not option.hidden for option in options
        )
    return counts


def _commands() -> Iterator[Any]:
    """Yield every command and subcommand as Typer has made it."""

    def below(command: Any) -> Iterator[Any]:
        yield command
        for part in getattr(command, "commands", {}).values():
            yield from below(part)

    for place, _ in COMMANDS.values():
        module, attribute = place.split(":")
        yield from below(typer.main.get_command(getattr(import_module(module), attribute)))


def _uses_of_the_policy_state() -> dict[str, int]:
    """Return the reaches of the core's modules into PolicyState, and the checks for a recorder."""
    reaches = two_hops = checks = 0
    for path in MODULES:
        outside = name_of(path).startswith("proxy/core/") and path.name not in STATE_MODULES
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and outside:
                reaches += _name_of(node.value) in STATE
                two_hops += (
                    isinstance(node.value, ast.Attribute) and _name_of(node.value.value) in STATE
                )
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
                checks += _name_of(node.left) == "recorder"
    return {
        "reaches into PolicyState": reaches,
        "reaches into PolicyState, two hops deep": two_hops,
        "checks for a recorder": checks,
    }


def _name_of(node: ast.expr) -> str:
    """Return the last name of `name` or `object.name`, "" for other expressions."""
    return str(getattr(node, "id", getattr(node, "attr", "")))


def _uses_in_text() -> dict[str, int]:
    """Return uses that the text of the modules shows."""
    texts = [path.read_text(encoding="utf-8") for path in MODULES]
    patterns = {
        "declarations of options": OPTION,
        "declarations of max_model_len": re.compile(r"\bmax_model_len: "),
        "fmt: skip": re.compile(r"# fmt: skip"),
        "imports of typer._click": re.compile(r"\btyper\._click\b"),
    }
    return {
        name: sum(len(pattern.findall(text)) for text in texts)
        for name, pattern in patterns.items()
    }


def show_rooms() -> None:
    """Print each room with its product, modules, lines and the first sentence of its caption."""
    for room in ROOMS:
        lines = sum(lines_of(path) for path in room.glob("*.py"))
        sentence = re.split(r"(?<=[.:])\s", " ".join(caption_of(room).split()))[0]
        counts = f"{len(modules_of(room)):>3}{lines:>6}"
        print(f"{product_of(room):<6}{name_of(room):<34}{counts}  {sentence}")


if __name__ == "__main__":
    show_rooms()
