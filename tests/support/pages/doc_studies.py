"""The figures of the studies in docs/research. `make studies` writes their results.

PYTHONPATH=tests/support python tests/support/pages/doc_studies.py runs/studies
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

from pages.doc_cli import command_named
from pages.doc_seeds import SEEDS, h200_table, rows_of, seeds_table
from paths import RESULTS, ROOT

from forebay.analysis.experiments.result import Column, markdown_table

PAGE = ROOT / "docs/research/studies.md"
LESSONS = ROOT / "docs/research/lessons"
LESSON_OF = {
    "prefill": "prefill-and-decode", "decode": "prefill-and-decode",
    "phases": "prefill-and-decode", "memory": "kv-cache", "kv": "kv-cache",
    "hol": "head-of-line", "hol-fleet": "head-of-line", "saturation": "saturation",
    "shared-document": "shared-documents", "flood": "fail-fast",
}  # fmt: skip
"""The lesson that shows a study. The others are on PAGE."""
DATA = RESULTS / "studies.json"
PLOTS = ROOT / "docs/assets/studies"
ORDER = (
    "prefill", "decode", "phases", "memory", "kv", "hol", "hol-fleet", "saturation",
    "shared-document", "flood", "needle",
)  # fmt: skip
BLOCK = re.compile(r"<!-- generated: study (?P<name>.+?) -->\n.*?<!-- end -->", re.DOTALL)
WIDTH = 78  # of a command; the site shows no more beside its menu
DIGITS = 6  # significant digits that are kept
TABLES_OF = {"hol-fleet", "flood"}  # they compare ways; of the others the sentence has the answer
WITH_A_FLEET = " Beside documents"  # here `hol` repeats the answer of the next study, `hol --fleet`
HIDDEN = ("seconds", "static_slots", "static_tokens_per_s", "continuous_tokens_per_s"
)  # fmt: skip
UNIT = re.compile(r"(?<=\d) (?=(?:[mµp]?s|/s|%) (?:\||$))", re.MULTILINE)
VALUE = re.compile(r" (--[\w-]+) (?!--)(\S+)")
OWN_OPTIONS = re.compile(r" --(out \S+|force|time-scale \S+)")


def page_of(name: str) -> Path:
    """The page that shows a study."""
    return LESSONS / f"{LESSON_OF[name]}.md" if name in LESSON_OF else PAGE


def blocks() -> list[str]:
    """The names of the generated blocks of the page."""
    return [f"study {name}" for name in ORDER]


def block(name: str) -> str:
    """The command and plot of a study, with its sentence or with its table and notes."""
    data = results().get(name)
    if data is None:
        return "No results yet: `make studies` writes them."
    columns = [
        Column(column["key"], column["heading"], column["kind"]) for column in data["columns"]
    ]
    command = f"{without_defaults(data['command'])} --out runs/{name}"
    parts = [f"```\n{broken(command)}\n```"]
    up = ".." if page_of(name) == PAGE else "../.."
    plot = f"![Plot of the study {name}]({up}/assets/studies/{name}.svg)"
    if name in TABLES_OF:
        notes = "\n".join(f"- {note}" for note in data["notes"])
        parts += [markdown_table(columns, data["rows"]), plot, notes]
    else:
        sentence = data["sentence"]
        if name == "hol":
            sentence = sentence.partition(WITH_A_FLEET)[0]
        parts += [plot, f"> {sentence}"]
    return whole_cells("\n\n".join(part for part in parts if part))


def without_defaults(line: str) -> str:
    """Return the command of a study without options that have their default."""
    options = command_named("experiment").commands[line.split()[2]].params
    defaults = {option.opts[0]: str(option.default) for option in options}
    return VALUE.sub(lambda found: "" if defaults.get(found[1]) == found[2] else found[0], line)


def broken(line: str) -> str:
    """Return a command on lines of at most WIDTH, each option beside its value."""
    lines = wrap(re.sub(" (?!--)", "\0", line), WIDTH, break_on_hyphens=False)
    return " \\\n    ".join(lines).replace("\0", " ")


def whole_cells(text: str) -> str:
    """Keep a number and its unit on one line, in cells that end with both."""
    return UNIT.sub("\N{NO-BREAK SPACE}", text)


@cache
def results() -> dict[str, Any]:
    """The committed results of all studies by name."""
    studies: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return studies


TABLES: Mapping[str, Callable[[], str]] = {
    "three seeds": lambda: whole_cells(seeds_table(results())),
    "a real H200": lambda: whole_cells(h200_table()),
}


def kept(study: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a results.json that the pages need: no dates, hidden columns only of HIDDEN."""
    keys = [column["key"] for column in study["columns"]]
    keys += [key for key in HIDDEN if study["rows"] and key in study["rows"][0] | study["rows"][-1]]
    return {
        "command": OWN_OPTIONS.sub("", study["command"]),
        "sentence": study["sentence"],
        "notes": study["notes"],
        "columns": study["columns"],
        "rows": [{key: rounded(row.get(key)) for key in keys} for row in study["rows"]],
    }


def rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def collect(folder: Path) -> None:
    """Write studies.json and the plots from the folders that the studies left.

    A study without a folder keeps the results that it has.
    """
    PLOTS.mkdir(exist_ok=True)
    studies = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for name in ORDER:
        source = folder / name / "results.json"
        if not source.exists():
            continue
        studies[name] = kept(json.loads(source.read_text(encoding="utf-8")))
        for seed in SEEDS[1:]:
            source = folder / f"{name}-{seed}" / "results.json"
            if source.exists():
                rows = kept(json.loads(source.read_text(encoding="utf-8")))["rows"]
                studies[name].setdefault("seeds", {})[str(seed)] = rows_of(name, rows)
        shutil.copyfile(folder / name / "plot.svg", PLOTS / f"{name}.svg")
    lines = []
    for name in (study_name for study_name in ORDER if study_name in studies):
        study = studies[name]
        rows = ",\n   ".join(json.dumps(row, ensure_ascii=False) for row in study.pop("rows"))
        head = json.dumps(study, ensure_ascii=False)[1:-1]
        lines.append(f' "{name}": {{{head},\n  "rows": [\n   {rows}]}}')
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    results.cache_clear()


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
