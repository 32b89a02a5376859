"""Write the page of deploy/study-h200.sh from its results: OUT/study.md.

    python deploy/study_page.py OUT

OUT/runs has the folders KIND-WAY-SEED of `forebay replay`: KIND is default or flag, WAY is direct
or forebay. OUT/servers/KIND has what `forebay fleet up` said of the servers, and facts.txt about
the machine. OUT/STUDY/results.json is a study's, and left-out.txt has a line for each step without
results.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from forebay.analysis.compare.figures import figures
from forebay.analysis.runs.load import load_run
from forebay.analysis.runs.run import RunData
from forebay.traces.ground.errors import InputError

SYSTEMS = {
    ("default", "direct"): "vLLM alone, default flags",
    ("default", "forebay"): "Forebay, default flags",
    ("flag", "direct"): "vLLM alone, `{flag}`",
    ("flag", "forebay"): "Forebay, `{flag}`",
}
FLAG = "--long-prefill-token-threshold"
FLEETS = ("default", "flag", "whole", "chunks", "studies")
STUDIES = ("hol", "shared-document", "saturation")
_RUN = re.compile(r"(default|flag)-(direct|forebay)-(.+)")
_HEAD = (
    "chat p50", "chat p90", "chat p99", "document p50", "document max", "in time", "cache hits",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One run: servers with these flags, the way to them, and the trace's seed."""

    kind: str
    way: str
    seed: str
    data: RunData

    @property
    def values(self) -> list[float | None]:
        """Return the columns of _HEAD: seconds to the first token, and shares."""
        chats, documents = (figures(self.data, name, (), 0) for name in ("chat", "document"))
        chat, document = chats.latency["ttft"], documents.latency["ttft"]
        everything = figures(self.data, None, (), 0)
        return [
            *(chat.values.get(name) for name in ("p50", "p90", "p99")),
            document.values.get("p50"),
            document.max,
            everything.attainment,
            everything.hit_ratio,
        ]


def page(out: Path) -> str:
    """Return the text of the page."""
    runs, unreadable = _runs(out / "runs")
    facts = _facts(out)
    flag = _flag(out)
    names = {key: name.format(flag=flag) for key, name in SYSTEMS.items()}
    parts = [
        "# Chats beside long documents, on this machine's GPUs",
        "Seconds to the first token, from when a request was due. In time: chats within 2 s and "
        "documents within 15 s. Each figure is the median over the seeds.",
        *_tables(runs, names),
        *_studies(out),
        "## What it ran on",
        "\n".join(f"- {name}: {value}" for name, value in facts) or "Not recorded.",
        "## What was left out",
        _left_out(out, [*unreadable, *_unlisted(out)]),
    ]
    return "\n\n".join(parts) + "\n"


def _runs(folder: Path) -> tuple[list[StudyRun], list[str]]:
    """Return the complete runs, and a line for each one that cannot be read."""
    runs, unreadable = [], []
    for path in sorted(folder.glob("*/run.json")):
        found = _RUN.fullmatch(path.parent.name)
        if found is None:
            continue
        try:
            data = load_run(path.parent)
        except InputError as error:
            unreadable.append(str(error))
            continue
        if data.info.get("ended") == "complete":
            runs.append(StudyRun(found[1], found[2], found[3], data))
    return runs, unreadable


def _tables(runs: Sequence[StudyRun], names: dict[tuple[str, str], str]) -> list[str]:
    """Return the table of medians and the table of all runs."""
    if not runs:
        return ["No run is complete."]
    medians, every = [], []
    for (kind, way), name in names.items():
        mine = [run for run in runs if (run.kind, run.way) == (kind, way)]
        if not mine:
            continue
        columns = zip(*(run.values for run in mine), strict=True)
        medians.append([name, str(len(mine)), *_cells(map(_median, columns))])
        every += [
            [run.data.name, *_cells(run.values), *_counts(run.data), _verdict(run.data)]
            for run in mine
        ]
    return [
        _table(["", "runs", *_HEAD], medians),
        "## Each run",
        _table(["run", *_HEAD, "requests", "rejected", "failed", "verdict"], every),
    ]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _cells(values: Iterable[float | None]) -> list[str]:
    seconds: Callable[[float], str] = "{:.2f}".format
    shares: Callable[[float], str] = "{:.1%}".format
    shown = [seconds] * (len(_HEAD) - 2) + [shares] * 2
    return [
        "-" if value is None else show(value) for show, value in zip(shown, values, strict=True)
    ]


def _counts(run: RunData) -> list[str]:
    every = figures(run, None, (), 0)
    return [str(count) for count in (every.intended, every.rejected, every.failed)]


def _verdict(run: RunData) -> str:
    dropped = run.info.get("trace", {}).get("dropped_too_long", 0)
    more = f", {dropped} requests too long for the context" if dropped else ""
    return f"{run.summary.get('verdict', '-')}{more}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _studies(out: Path) -> list[str]:
    parts = []
    for study in STUDIES:
        path = out / study / "results.json"
        if path.is_file():
            said = json.loads(path.read_text(encoding="utf-8")).get("sentence", "")
            parts.append(f"**{study}**: {said} (`{study}/plot.svg`)")
    return ["## Studies of the first GPU", *parts] if parts else []


def _facts(out: Path) -> list[tuple[str, str]]:
    """Return what is known of machine, versions and servers; a fact that repeats stands once."""
    found: dict[tuple[str, str], None] = {}
    for name in FLEETS:
        folder = out / "servers" / name
        if (folder / "up.json").is_file() and (text := (folder / "up.json").read_text()):
            told = json.loads(text)
            found["model", told["model"]] = None
            found["vLLM", told["vllm"]] = None
        for line in _lines(folder / "facts.txt"):
            key, _, value = line.partition(": ")
            label = f"server ({name})" if key == "server" else key
            if key != "lacks":
                found[label, f"`{value}`" if key == "server" else value] = None
    return list(found)


def _flag(out: Path) -> str:
    """Return the flag of the second kind, with its value."""
    for line in _lines(out / "servers" / "flag" / "facts.txt"):
        if match := re.search(rf"{FLAG} \d+", line):
            return match.group()
    return FLAG


def _unlisted(out: Path) -> list[str]:
    """Return a line for the optional flags that this vLLM lacks."""
    lines = [line for name in FLEETS for line in _lines(out / "servers" / name / "facts.txt")]
    lacks = sorted({line.removeprefix("lacks: ") for line in lines if line.startswith("lacks: ")})
    return [f"flags that this vLLM does not have: {', '.join(lacks)}"] if lacks else []


def _left_out(out: Path, more: Sequence[str]) -> str:
    lines = [*_lines(out / "left-out.txt"), *more]
    return "\n".join(f"- {line}" for line in lines) or "Nothing."


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "study.md").write_text(page(folder), encoding="utf-8")
