"""Each folder of code is a room: few modules, a caption that names them, tests with their names."""

import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from subprocess import run

import pytest
from paths import ROOT, TESTS
from source_tree import FOLDERS, ROOMS, caption_of, modules_of, name_of, rooms_of

MODULES = 12
SUBJECT = 72  # characters


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_a_room_has_few_modules(room: Path) -> None:
    assert len(modules_of(room)) <= MODULES


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_a_caption_names_all_that_is_in_the_room(room: Path) -> None:
    words = set(re.findall(r"\w+", caption_of(room)))
    assert [name for name in (*modules_of(room), *rooms_of(room)) if name not in words] == []


def test_the_wall_of_load_names_every_room_of_load_and_lab() -> None:
    """A room that the contract leaves out could import what it likes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    wall = next(each for each in contracts if each["name"].startswith("load imports nothing"))
    folders = json.loads((TESTS / "weight.json").read_text())["folders"]["lab"].split()
    lab = {room.replace("/", ".") for room in folders if not room.startswith("tests/")}
    assert set(wall["forbidden_modules"]) == {f"forebay.{name}" for name in ("proxy", *lab)}
    parts = {
        ".".join(("forebay", folder, path.stem))
        for folder in ("analysis", "replay")
        for path in (ROOT / folder).iterdir()
        if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")
    }
    assert parts | {"forebay.proxy", "forebay.traces"} == {
        *wall["source_modules"],
        *wall["forbidden_modules"],
    }


def test_a_room_of_tests_has_few_files() -> None:
    files = Counter(str(test.parent.relative_to(TESTS)) for test in TESTS.rglob("test_*.py"))
    assert not {room: count for room, count in files.items() if count > MODULES}


@pytest.mark.parametrize("folder", [*FOLDERS, "core"])
def test_a_test_file_has_the_name_of_a_module_or_room(folder: str) -> None:
    """More than one file of a module has words behind its name: `start`, `start_with_two`."""
    package = ROOT / ("proxy" if folder == "core" else folder)
    names = {path.stem for path in package.rglob("*.py")} | {
        room.name for room in ROOMS if room.is_relative_to(package)
    }
    stems = [test.stem.removeprefix("test_") for test in (TESTS / folder).rglob("test_*.py")]
    assert len(stems) > 10
    assert [stem for stem in stems if names.isdisjoint(beginnings(stem))] == []


def beginnings(stem: str) -> list[str]:
    words = stem.split("_")
    return ["_".join(words[:count]) for count in range(1, len(words) + 1)]


def test_a_commit_has_a_short_subject() -> None:
    """Git shows 72 characters of a subject in most places. A second thought is another commit."""
    log = run(["git", "log", "--format=%s", "-100"], cwd=ROOT, capture_output=True, text=True)
    if log.returncode:
        pytest.skip("no git checkout")
    assert [s for s in log.stdout.splitlines() if len(s) > SUBJECT or ";" in s] == []
