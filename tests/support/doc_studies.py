"""The figures of docs/research/studies.md, which `make studies` writes.

PYTHONPATH=tests/support python tests/support/doc_studies.py runs/studies
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from doc_seeds import SEEDS, h200_table, rows_of, seeds_table
from paths import RESULTS, ROOT

from forebay.analysis.experiments.result import Column, cells_of, markdown_table

PAGE = ROOT / "docs/research/studies.md"
DATA = RESULTS / "studies.json"
PLOTS = ROOT / "docs/assets/studies"
ORDER = (
    "prefill", "decode", "phases", "memory", "kv", "hol", "hol-fleet", "saturation",
    "shared-document", "flood", "needle",
)  # fmt: skip
BLOCK = re.compile(r"<!-- generated: study (?P<name>.+?) -->\n.*?<!-- end -->", re.DOTALL)
DIGITS = 6  # significant digits that are kept
ALL_ROWS_EQUAL = {"needle"}  # a simulated engine finds nothing; the sentence counts the prompts
UNIT = re.compile(r"(?<=\d) (?=(?:[mµp]?s|/s|%) (?:\||$))", re.MULTILINE)
OWN_OPTIONS = re.compile(r" --(out \S+|force|time-scale \S+)")


@dataclass(frozen=True, slots=True)
class Beside:
    """A figure of the course to compare with ours: the cell `key` of the row that `row` matches."""

    what: str
    course: str
    row: Mapping[str, Any]
    key: str
    why: str


TEXT = "the API server takes 3.8 µs a token of text (an H200's); the course has no such term"
COURSE: Mapping[str, Sequence[Beside]] = {
    "prefill": [
        Beside("TTFT of 1,024 tokens", "0.03 s", {"prompt_tokens": 1024}, "ttft_s", TEXT),
        Beside("TTFT of 4,096 tokens", "0.08 s", {"prompt_tokens": 4096}, "ttft_s", TEXT),
        Beside("TTFT of 32,768 tokens", "0.87 s", {"prompt_tokens": 32768}, "ttft_s", TEXT),
        Beside("TTFT of 65,536 tokens", "2.49 s", {"prompt_tokens": 65536}, "ttft_s", TEXT),
        Beside("TTFT of 128,000 tokens", "7.77 s", {"prompt_tokens": 128000}, "ttft_s", TEXT),
        Beside("fastest", "50,689 tokens/s", {"prompt_tokens": 4096}, "tokens_per_s", TEXT),
        Beside("at 128,000", "16,478 tokens/s", {"prompt_tokens": 128000}, "tokens_per_s", TEXT),
    ],
    "decode": [
        Beside(
            "2,048 tokens alone", "105.99 tokens/s", {"batch": 1, "output_tokens": 2048},
            "tokens_per_s", "the slope of the course's two rows is what the model is fitted to",
        ),
        Beside(
            "128 tokens alone", "95.68 tokens/s", {"batch": 1, "output_tokens": 128},
            "tokens_per_s",
            "the course counts 139 ms a request besides its tokens; ours is the time of a token",
        ),
    ],
    "phases": [
        Beside(
            "prefill over decode", "about 500×", {"phase": "prefill", "prompt_tokens": 4096},
            "ratio", "as in `prefill`; the course divides its fastest prefill by one decode",
        ),
        Beside(
            "FLOP/byte of a prefill of 512", "512", {"phase": "prefill", "prompt_tokens": 512},
            "flop_per_byte", "the course counts weights only; ours has attention and the head",
        ),
        Beside(
            "FLOP/byte of decode", "0.875", {"phase": "decode", "batch": 1}, "flop_per_byte",
            "2 FLOP for each weight of 2 bytes is 1; reading the KV cache lowers it",
        ),
        Beside(
            "slots in use, static batching", "30-40 %", {"phase": "decode", "batch": 16},
            "static_slots", "1/H(n) for exponential lengths: 37 % of 8 slots, 30 % of 16; "
            "continuous batching refills a slot at once",
        ),
    ],
    "memory": [
        Beside(
            "saved by pages", "87.5 %", {"max_model_len": 2048}, "saved_share",
            "the same: 256 of 2,048 tokens used",
        ),
        Beside(
            "requests at once", "2 to 4×", {"max_model_len": 2048}, "gain",
            "the gain is max_model_len over the tokens used: 4× is 512 of 2,048",
        ),
        Beside(
            "attention matrix of 2,048 tokens, all layers", "16 GB", {"max_model_len": 2048},
            "matrix_gib", "the same in GiB: 32 heads in 32 layers of 16 MiB",
        ),
    ],
    "hol": [
        Beside(
            "worst gap beside 120,000 tokens, whole", "6.99 s",
            {"max_num_batched_tokens": 131072}, "worst_gap_s", "a held-out row of the calibration",
        ),
        Beside(
            "worst gap, chunks of 512", "0.13 s", {"max_num_batched_tokens": 512}, "worst_gap_s",
            "one step of 512 tokens; the course's gap is as long as two such steps",
        ),
    ],
    "shared-document": [
        Beside(
            "TTFT of a cached question", "1/50 of cold", {"way": "proxy", "phase": "one more"},
            "ttft_s", "60,000 tokens of text take 0.2 s in the API server, cached or not",
        ),
    ],
}  # fmt: skip


def blocks() -> list[str]:
    """The names of the generated blocks of the page."""
    return [f"study {name}" for name in ORDER]


def block(name: str) -> str:
    """The command, table, course's figures, plot, sentence and notes of a study."""
    data = results().get(name)
    if data is None:
        return "No results yet: `make studies` writes them."
    columns = [
        Column(column["key"], column["heading"], column["kind"]) for column in data["columns"]
    ]
    parts = [f"```\n{data['command']}\n```"]
    if name not in ALL_ROWS_EQUAL:
        parts.append(markdown_table(columns, data["rows"]))
    if name in COURSE:
        parts.append(beside_the_course(name, data))
    parts += [
        f"![Plot of the study {name}](../assets/studies/{name}.svg)",
        f"> {data['sentence']}",
        "\n".join(f"- {note}" for note in data["notes"]),
    ]
    return whole_cells("\n\n".join(part for part in parts if part))


def whole_cells(text: str) -> str:
    """Keep a number and its unit on one line, in cells that end with both."""
    return UNIT.sub("\N{NO-BREAK SPACE}", text)


def beside_the_course(name: str, data: Mapping[str, Any]) -> str:
    """The course's figures of a study next to ours, and why they differ."""
    kinds = {column["key"]: column["kind"] for column in data["columns"]}
    lines = ["| figure | course | here | why |", "| --- | --: | --: | --- |"]
    earlier = ""
    for figure in COURSE[name]:
        (row,) = [r for r in data["rows"] if all(r.get(k) == v for k, v in figure.row.items())]
        (ours,) = cells_of(Column(figure.key, "", kinds[figure.key]), [row[figure.key]])
        why = "the same" if figure.why == earlier else figure.why
        lines.append(f"| {figure.what} | {figure.course} | {ours} | {why} |")
        earlier = figure.why
    return "\n".join(lines)


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
    """The parts of a results.json that the page needs: no dates, no hidden columns."""
    keys = [column["key"] for column in study["columns"]]
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


def renew_page() -> None:
    """Renew the blocks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    makers: dict[str, Callable[[], str]] = {
        **{name: partial(block, name.removeprefix("study ")) for name in blocks()},
        **TABLES,
    }
    for name, made in makers.items():
        begin, end = f"<!-- generated: {name} -->", "<!-- end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{made()}\n\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
    renew_page()
