"""Two tables of docs/research/studies.md, three seeds of the studies and a real H200 beside us, and
README's table of this H200.

`make studies` leaves the results of seed N in a folder NAME-N. The second table needs no folder: it
simulates the requests of the real runs in tests/data/h200-2026-11-26, which takes a second.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from paths import ROOT
from result_lines import markdown_table

from forebay.analysis.compare.figures import figures
from forebay.analysis.experiments.result import Column, cells_of
from forebay.analysis.runs.load import load_run
from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.quantiles import finite, percentile_table
from forebay.proxy.cli import main

SEEDS = (0, 1, 2)
REAL = ROOT / "tests/data/h200-2026-11-26"
SERVER = (
    "--gpus",
    "1",
    "--policy",
    "direct",
    "--vllm-version",
    "0.26",
    "--max-model-len",
    "131072",
)
FLAGS = {"direct-4": (), "flag-direct-4": ("--long-prefill-token-threshold", "2048")}
WORDS = {"direct-4": "default flags", "flag-direct-4": "`--long-prefill-token-threshold 2048`"}
STALLED_S = 0.5  # as in `hol --fleet`
PROXY = "a435a73"  # Forebay's commit in both runs through it
RUNS = {
    "direct-4": "vLLM alone, default flags",
    "forebay-4": f"Forebay {PROXY}, default flags",
    "flag-direct-4": f"vLLM alone, {WORDS['flag-direct-4']}",
    "flag-forebay-4": f"Forebay {PROXY}, told of that flag",
}
TARGETS_S = {"chat": 2.0, "document": 15.0}


@dataclass(frozen=True, slots=True)
class Seeded:
    """A figure of a study: the cell `key` of the one row that `row` matches."""

    study: str
    what: str
    row: Mapping[str, Any]
    key: str

    def matches(self, row: Mapping[str, Any]) -> bool:
        return all(row.get(key) == value for key, value in self.row.items())


WHOLE, CHUNKED = ({"way": "proxy", "prefill": name} for name in ("whole", "chunked"))
TOLD = {"way": "round robin", "prefill": "chunked"}
OTHERS = {"way": "proxy", "phase": "the others"}
FIGURES = (
    Seeded("hol-fleet", "hol, fleet: longest stall, whole", WHOLE, "stall_s"),
    Seeded("hol-fleet", "the same in chunks of 8,192", CHUNKED, "stall_s"),
    Seeded("hol-fleet", "chats' p99 TTFT, in these chunks", CHUNKED, "ttft_p99_s"),
    Seeded("hol-fleet", "the same by round robin", TOLD, "ttft_p99_s"),
    Seeded("saturation", "saturation: knee, in flight", {"knee": "knee"}, "load"),
    Seeded("saturation", "T_sat", {"knee": "knee"}, "requests_per_s"),
    Seeded("shared-document", "shared document: cached", OTHERS, "hit_ratio"),
    Seeded("shared-document", "TTFT p50 of the others", OTHERS, "ttft_s"),
    Seeded("flood", "flood: goodput at 1.5×", {"way": "proxy", "load": 1.5},
           "goodput_per_s"),
    Seeded("flood", "the same without limits", {"way": "proxy, no limits", "load": 1.5},
           "goodput_per_s"),
    Seeded("flood", "the same by round robin", {"way": "round robin", "load": 1.5},
           "goodput_per_s"),
)  # fmt: skip


def rows_of(name: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cells of a study that the table shows, by row."""
    found = []
    for figure in FIGURES:
        if figure.study == name:
            (row,) = [row for row in rows if figure.matches(row)]
            found.append({**figure.row, figure.key: row[figure.key]})
    return found


def seeds_table(results: Mapping[str, Any]) -> str:
    """Figures of the studies with three seeds each."""
    heads = " | ".join(f"seed {seed}" for seed in SEEDS)
    lines = [f"| figure | {heads} |", f"| --- {'| --: ' * len(SEEDS)}|"]
    for figure in FIGURES:
        study = results[figure.study]
        kinds = {column["key"]: column["kind"] for column in study["columns"]}
        column = Column(figure.key, "", kinds[figure.key])
        shown = cells_of(column, [_value(figure, study, seed) for seed in SEEDS])
        lines.append(f"| {figure.what} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _value(figure: Seeded, study: Mapping[str, Any], seed: int) -> Any:
    rows = study["seeds"][str(seed)] if seed else study["rows"]
    (value,) = {row[figure.key] for row in rows if figure.key in row and figure.matches(row)}
    return value


@dataclass(frozen=True, slots=True)
class Measured:
    """Times (s) and shares of the chats and documents of t4.jsonl, in a single run."""

    chat_p50_s: float
    chat_p90_s: float
    document_max_s: float
    tpot_p50_s: float
    stall_max_s: float
    stalled_share: float
    in_time_share: float


def _measured(run: RunData) -> Measured:
    chat, document = (figures(run, name, (), 0).latency for name in ("chat", "document"))
    stalls = run.numbers["stall_s"][run.rows("chat", "ok")]
    whole = figures(run, None, (), 0)
    told = (chat["ttft"].values["p50"], chat["ttft"].values["p90"], document["ttft"].max,
            chat["tpot"].values["p50"], float(np.nanmax(stalls)),
            float(np.mean(stalls > STALLED_S)), whole.attainment)  # fmt: skip
    return Measured(*(float("nan") if value is None else value for value in told))


def _simulated(name: str, folder: Path) -> RunData:
    trace, out = folder / "t4.jsonl", folder / name
    summary = json.loads((REAL / name / "summary.json").read_text(encoding="utf-8"))
    lines = (REAL / "t4.jsonl").read_text(encoding="utf-8").splitlines()
    trace.write_text("\n".join(lines[: summary["requests"]]) + "\n", encoding="utf-8")
    command = ["simulate", str(trace), *SERVER, *FLAGS[name], "--out", str(out), "--quiet"]
    with redirect_stdout(StringIO()):
        assert main(command) == 0
    return load_run(out)


@cache
def h200_table() -> str:
    """The same requests on a real H200 and simulated, without a proxy."""
    columns = (
        Column("chat_p50_s", "chats' TTFT p50"), Column("chat_p90_s", "p90"),
        Column("document_max_s", "documents' longest TTFT"),
        Column("tpot_p50_s", "chats' TPOT p50"),
        Column("stall_max_s", "longest stall of a chat"),
        Column("stalled_share", f"chats stalled over {STALLED_S} s", "share"),
        Column("in_time_share", "in time", "share"),
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        runs = [
            _measured(run)
            for name in FLAGS
            for run in (load_run(REAL / name), _simulated(name, Path(folder)))
        ]
    heads = "".join(f" H200, {WORDS[name]} | simulated |" for name in FLAGS)
    lines = [f"| figure |{heads}", f"| --- {'| --: ' * len(runs)}|"]
    for column in columns:
        cells = cells_of(column, [getattr(run, column.key) for run in runs])
        lines.append(f"| {column.heading} | {' | '.join(cells)} |")
    return "\n".join(lines)


def real_runs() -> str:
    """README's table: vLLM on a real H200, alone and behind Forebay, one run each."""
    heads = ("seconds to the first token", "chats", "p50", "p90", "longest", "documents",
             "shortest to longest", "in time, %", "rejected")  # fmt: skip
    rows = []
    for name, label in RUNS.items():
        columns = ["bucket", "ttft_response_s", "outcome"]
        listed = pq.read_table(REAL / name / "requests.parquet", columns=columns).to_pylist()
        of = {
            bucket: np.array([row["ttft_response_s"] for row in listed if row["bucket"] == bucket],
                             dtype=np.float64)
            for bucket in TARGETS_S
        }  # fmt: skip
        chats = percentile_table(of["chat"])
        documents = np.sort(finite(of["document"]))
        met = sum(int((of[bucket] <= most_s).sum()) for bucket, most_s in TARGETS_S.items())
        rows.append(
            (label, str(len(of["chat"])), f"{chats.values['p50']:.2f}",
             f"{chats.values['p90']:.2f}", f"{chats.max:.2f}", str(len(of["document"])),
             f"{documents[0]:.1f} to {documents[-1]:.1f}", f"{100 * met / len(listed):.1f}",
             str(sum(row["outcome"] == "rejected" for row in listed)))
        )  # fmt: skip
    return markdown_table(heads, rows)
