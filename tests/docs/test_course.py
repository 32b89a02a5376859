"""docs/research/: the course and the studies.

The command of each row of the course exists, and the cheap ones print its figures. The page of the
studies is made from results, the results from today's code.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from fakes.course_models import MODELS
from pages import course
from pages import doc_studies as studies
from pages.doc_cli import command_named
from paths import ROOT

from forebay.proxy.cli import COMMANDS, main

PAGE = course.PAGE.read_text(encoding="utf-8")
NUMBER = re.compile(r"\*\*(\d+)(?:\. |\*\*)")
GROUP = re.compile(r"^- [^*]+? \((.+?)\): ", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
STUDIES = command_named("experiment").commands


ROWS = {int(row[2]): row for row in course.ROW.finditer(PAGE)}
HERE = {number: row["here"] for number, row in ROWS.items()}
COMMANDS_OF = {str(number): row["command"] or "" for number, row in ROWS.items()} | {
    line: line for line in GROUP.findall(PAGE)
}
"""The commands of each line of the page, by its number or by themselves."""


def test_every_item_of_the_course_is_there_once_and_no_correction_is_left_unexplained() -> None:
    assert sorted(map(int, NUMBER.findall(PAGE))) == list(range(1, 125))
    corrected = PAGE.partition("## Corrected")[2].partition("\n## ")[0]
    rows = list(course.ROW.finditer(corrected))
    assert len(rows) == corrected.count("\n- ")
    assert [row[2] for row in rows if not row["why"]] == []


@pytest.mark.parametrize("number", course.HERE)
def test_a_row_has_the_figures_of_the_results(number: int) -> None:
    assert HERE[number] == course.here(number), "make studies"


def options_of(command: Any) -> set[str]:
    """The options of a command and of all its subcommands."""
    own = {name for parameter in command.params for name in parameter.opts}
    return own.union(*map(options_of, getattr(command, "commands", {}).values()))


def check(code: str) -> None:
    """Fail, unless there is such a command with these options, file, path or setting."""
    words = shlex.split(code.partition(" with ")[0])
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
    elif words[0] in COMMANDS or words[0] in STUDIES:
        named = [STUDIES[words[0]]] if words[0] in STUDIES else []
        named += [command_named(words[0])] if words[0] in COMMANDS else []
        subcommand = words[1] if len(words) > 1 and not words[1].startswith("-") else None
        if subcommand:
            groups = [command for command in named if getattr(command, "commands", None)]
            named = [command.commands[subcommand] for command in groups]
        given = {word for word in words if word.startswith("--")}
        assert given <= set().union(*map(options_of, named))
    elif words[0].startswith("--"):
        assert any(words[0] in options_of(command_named(name)) for name in ("engine", "simulate"))
    elif words[0].startswith("/"):
        assert words[0] in (ROOT / "docs/reference/http.md").read_text(encoding="utf-8") + (
            ROOT / "docs/reference/admin-api.md"
        ).read_text(encoding="utf-8")
    elif words[0].startswith("sim:"):
        assert main(["experiment", "memory", "--help"]) == 0
    elif (ROOT / words[0]).exists():
        pass
    else:
        key = words[0].rpartition(".")[2]
        schema = (ROOT / "docs/reference/forebay.schema.json").read_text(encoding="utf-8")
        assert f'"{key}"' in schema


@pytest.mark.parametrize("line", [line for line, named in COMMANDS_OF.items() if "`" in named])
def test_the_commands_of_a_line_exist(line: str) -> None:
    for code in CODE.findall(COMMANDS_OF[line]):
        check(code)


PRINTED = (
    # row, command, figures that it prints, and the same figures as the row has them
    (3, "kv --model phi-3-mini --gpu h200-nvl --lengths 1024,4096,32768,65536,128000",
     ("0.38", "1.50", "12.00", "24.00", "46.88"), "0.38, 1.50, 12.00, 24.00, 46.88 GiB"),
    (9, "kv --model phi-3-mini --gpu h200-nvl", ("MHA, 32 layers, 384 KiB per token",), "384 KiB"),
    (11, "kv --model phi-3-mini --gpu h200-nvl --lengths 128000", ("2.50x       2",), "2"),
    (40, "kv --model 7b --gpu a100 --lengths 2048", ("2,048       1.00",), "1.00 GiB"),
    (41, "kv --model 7b --gpu a100 --lengths 2048", ("58.26x      58",), "58 fit"),
    (51, "kv --model 13b --gpu a100 --lengths 4096", ("4,096       3.12",), "3.12 GiB"),
    (53, "kv --model 7b --gpu-memory-gib 24 --weights-gib 14 --lengths 512", ("x      28",), "28"),
    (109, "kv --model 1.5b --gpu rtx-4090 --max-model-len 4096", ("627,824 tokens",), "627,824"),
    (113, "kv --model 7b --gpu a100", ("512 KiB per token",), "512"),
    (113, "kv --model llama-3-8b --gpu h200", ("128 KiB per token",), "128"),
    (113, "kv --model 70b --gpu h200 --tp 4", ("80 KiB per token",), "80 KiB"),
    (114, "kv --model llama-3-8b --gpu h200", ("868,528 tokens",), "2×"),
    (114, "kv --model llama-3-8b --gpu h200 --kv-cache-dtype fp8", ("1,737,072 tokens",), "2×"),
    (120, "kv --model 70b --gpu a100 --tp 4", ("501,632 tokens",), "501,632 tokens"),
)  # fmt: skip


@pytest.mark.parametrize(("number", "line", "printed", "said"), PRINTED)
def test_a_cheap_command_prints_the_figures_of_its_row(
    number: int,
    line: str,
    printed: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = []
    for word in line.split():
        if word in MODELS:
            (tmp_path / word).write_text(json.dumps(MODELS[word]))
        words.append(str(tmp_path / word) if word in MODELS else word)
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert [text for text in printed if " ".join(text.split()) not in shown] == []
    assert said in HERE[number]


# The page of the studies.


def test_every_study_has_a_lesson_in_the_order_of_the_course() -> None:
    pages = dict.fromkeys(map(studies.page_of, studies.ORDER))
    shown = [name for page in pages for name in studies.BLOCK.findall(page.read_text("utf-8"))]
    assert shown == list(studies.ORDER)
    assert list(studies.results()) == [name for name in studies.ORDER if name in studies.results()]


@pytest.mark.parametrize("name", ["memory", "prefill"])
def test_the_results_are_todays(name: str, tmp_path: Path) -> None:
    words = shlex.split(studies.results()[name]["command"])[1:]
    assert main([*words, "--out", str(tmp_path)]) == 0
    today = studies.kept(json.loads((tmp_path / "results.json").read_text(encoding="utf-8")))
    assert today == studies.results()[name], "make studies"


EXERCISE = re.compile(
    r"^ {4}```\n(?P<line>.+?)\n {4}```$|Answer</summary>\n\n {4}\*\*(?P<answer>.+?)\*\*",
    re.DOTALL | re.MULTILINE,
)
EXERCISES: dict[str, list[str]] = {}
"""The answers that a command prints: those after it, up to the next command."""
for _page in sorted(studies.LESSONS.glob("*.md")):
    for _found in EXERCISE.finditer(_page.read_text(encoding="utf-8").partition("## Exercises")[2]):
        if _found["line"]:
            _line = _found["line"].replace("\\\n", "")
        else:
            EXERCISES.setdefault(_line, []).append(_found["answer"])


@pytest.mark.parametrize("line", EXERCISES)
def test_the_command_of_an_exercise_prints_its_answers(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)[1:]
    if "--out" in words:
        words[words.index("--out") + 1] = str(tmp_path)
    assert main(words) == 0
    printed = "".join(capsys.readouterr().out.split())
    assert [answer for answer in EXERCISES[line] if answer.replace(" ", "") not in printed] == []


def test_every_lesson_has_three_exercises() -> None:
    assert sum(map(len, EXERCISES.values())) == 3 * len({*studies.LESSON_OF.values(), "sizing"})
