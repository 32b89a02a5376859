"""The generated parts of README.md and docs/: the function of each block."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import cases_page
from guard_page import decisions
from pages import course, real_model
from pages import doc_charts as charts
from pages import doc_cli as cli
from pages import doc_reference as reference
from pages import doc_results as results
from pages import doc_studies as studies
from pages.doc_commands import output_of
from pages.doc_seeds import real_runs
from paths import ROOT

from forebay.proxy import log_events as events

Maker = Callable[[], str]
BLOCK = re.compile(r"<!-- generated: (?P<name>.+?) -->\n.*?<!-- end -->", re.DOTALL)
FILES: Mapping[str, Maker] = {
    **{
        f"docs/assets/{name}-{theme}.svg": partial(charts.chart, name, theme)
        for name in charts.CHARTS
        for theme in charts.THEMES
    },
    "docs/reference/forebay.schema.json": reference.config_schema,
}
BLOCKS: Mapping[str, Maker] = {
    "chart": charts.picture,
    "problems": results.problems,
    "scheduler": results.scheduler,
    "scheduler cases": results.scheduler_cases,
    "result tables": results.tables,
    "fleets": results.fleets,
    "router models": results.models,
    "live results": results.live,
    "results in words": results.words,
    "all runs": results.all_runs,
    "real runs": real_runs,
    "decisions": decisions,
    "cases": cases_page.cases,
    "commands": partial(cli.cli_pages, examples=False),
    "configuration keys": reference.config_keys,
    "error codes": reference.error_table,
    "log events": events.reference,
    "columns": reference.columns,
    "definitions": reference.definitions,
    "tags": reference.tag_table,
    "trace keys": reference.trace_table,
    "trace formats": reference.format_table,
    "targets of --map": reference.target_table,
    "vLLM versions": reference.version_table,
    **{name: partial(studies.block, name.removeprefix("study ")) for name in studies.blocks()},
    **studies.TABLES,
    "sizing": course.sizes,
    "second visit": course.visits,
    real_model.BLOCK: real_model.block,
}


def pages() -> list[Path]:
    """Every Markdown file with generated blocks of this kind."""
    files: list[Path] = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in files if BLOCK.search(path.read_text(encoding="utf-8"))]


def renewed(text: str) -> str:
    """Return a page with every generated block renewed. Raises KeyError for an unknown name."""
    return BLOCK.sub(_made, text)


def _made(match: re.Match[str]) -> str:
    name = match["name"]
    shown = name.removeprefix("output: ")
    content = BLOCKS[name]() if shown == name else output_of(shown)
    gap = "" if shown != name else "\n"  # a table needs an empty line in front of it
    return f"<!-- generated: {name} -->\n{gap}{content}\n{gap}<!-- end -->"


def write_all() -> None:
    """Write every generated file and block."""
    for name, make in FILES.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
    for path in pages():
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
    page = course.PAGE.read_text(encoding="utf-8")
    course.PAGE.write_text(course.renewed(page), encoding="utf-8")


if __name__ == "__main__":
    write_all()
