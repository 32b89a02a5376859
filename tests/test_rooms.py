"""Each folder of code is a room: few modules, and a caption that names them in reading order.

The two lists hold the rooms that are not done yet. They may only shrink: a room that keeps the
rule has to leave its list.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from paths import ROOT, TESTS

FOLDERS = ("analysis", "proxy", "replay", "traces")
MODULES = 12
ROOMS = sorted(init.parent for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py"))

# room: modules that it still has
CROWDED: dict[str, int] = {}
WITHOUT_CAPTION: set[str] = set()


def name_of(room: Path) -> str:
    return str(room.relative_to(ROOT))


def modules_of(room: Path) -> list[str]:
    return sorted(path.stem for path in room.glob("*.py") if path.stem != "__init__")


def rooms_of(room: Path) -> list[str]:
    return sorted(path.parent.name for path in room.glob("*/__init__.py"))


def caption_of(room: Path) -> str:
    return ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_a_room_has_few_modules(room: Path) -> None:
    modules, expected = len(modules_of(room)), CROWDED.get(name_of(room))
    if expected is None:
        assert modules <= MODULES
    else:
        assert modules == expected, "a crowded room may only shrink: then lower its number"
        assert modules > MODULES, "not crowded any more: take the room off the list"


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_a_caption_names_all_that_is_in_the_room(room: Path) -> None:
    words = set(re.findall(r"\w+", caption_of(room)))
    missing = [name for name in (*modules_of(room), *rooms_of(room)) if name not in words]
    if name_of(room) in WITHOUT_CAPTION:
        assert missing, "the caption is complete: take the room off the list"
    else:
        assert not missing


def test_a_room_of_tests_has_few_files() -> None:
    files = Counter(str(test.parent.relative_to(TESTS)) for test in TESTS.rglob("test_*.py"))
    assert not {room: count for room, count in files.items() if count > MODULES}


def test_the_lists_name_rooms_that_exist() -> None:
    assert {*CROWDED, *WITHOUT_CAPTION} <= {name_of(room) for room in ROOMS}
