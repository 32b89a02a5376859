"""Write docs/benchmarks/load-generators.md from the JSON that `bench_replay.py` makes.

python tests/bench/replay/load_generators_page.py
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "load-generators.md"
DATA = Path(__file__).resolve().parents[1] / "results" / "load-generators.json"
NAMES = {  # in the order of the page; others follow
    "lean": "lean client",
    "forebay": "Forebay",
    "vllm": "vllm bench",
}
OTHERS = "with others: "
OURS = ("lean", "forebay")
SHOWN_RATES = {"500", "3000"}  # of arrivals; the data has more
MEDIANS = """Median processor time, and in brackets its ratio to that of the lean client.

"""
EARLIER = """Other tools, in a run of their own on 2026-11-24:

"""
GOALS = {"request": 1.2, "streamed token": 1.2, "120k-token prompt": 1.3}

HEAD = """# What load generators cost

A load generator that is busy measures itself. This page compares the processor time and the pace
of `forebay replay` with those of other tools, and with a **lean client**: 150 lines of Python on
uvloop that only send and read (`tests/bench/replay/lean_client.py`).

Each tool runs against the same server on loopback. The server streams one token in each chunk, and
notes when requests arrive. Server and tool share two cores. `make bench-replay` repeats it.
"""
NOTES = """## Notes

- A figure is the difference between a long and a short run, divided by the difference in work. So
  starting up is not counted. Each row of the arrivals is one run.
- Three goals are missed: a request, a prompt of 120,000 tokens, and the p99 error of arrivals (goal
  1.2) in about half of the runs. Sending and reading alone, without recording and rendering, took
  1.5 times the lean client.
- Making prompts is part of the figure. The other tools use a tokenizer. inference-perf was still
  making its prompts of 120,000 tokens when the measurement ended.
- The error of an arrival is its distance from the schedule, as the server saw it, at the best
  common offset. The Poisson schedule of other tools is unknown, so they have no error there.
- The other tools' arrivals are of 2026-11-24, on another machine, so they have no ratio.
- inference-perf sends Poisson arrivals where constant arrivals are asked for.
"""


def page(data: Mapping[str, Any]) -> str:
    results = {key: _in_order(found) for key, found in data["results"].items()}
    parts = [HEAD, f"Measured on {data['at'][:10]} with Python {data['python']}.\n"]
    parts.append("## Processor time\n\n" + MEDIANS + _cpu(results))
    if any(key.startswith(OTHERS) for key in results):
        parts.append(EARLIER + _cpu(results, OTHERS))
    if "highest rate" in results:
        parts.append("## Highest true rate\n\n" + _highest(results["highest rate"]))
    parts.append("## Arrivals\n\n" + _arrivals(results))
    return "\n".join([*parts, NOTES])


def _in_order(found: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in (*NAMES, *found) if name in found]
    return {name: found[name] for name in names}


def _cpu(results: Mapping[str, Any], run: str = "") -> str:
    names = [name for name in GOALS if f"{run}cpu of a {name}" in results]
    tools = list(dict.fromkeys(t for name in names for t in results[f"{run}cpu of a {name}"]))
    if run:  # Forebay was an older version then
        tools.remove("forebay")
    lines = []
    for tool in tools:
        cells = []
        for name in names:
            found = results[f"{run}cpu of a {name}"]
            value = median(found[tool]) if found.get(tool) else None
            if value is None:
                cells.append("-")
            else:
                cells.append(f"{value * 1e6:,.0f} µs ({value / median(found['lean']):.1f})")
        lines.append([NAMES.get(tool, tool), *cells])
    goals = [f"a {name}; goal {GOALS[name]}" for name in names]
    return _table(["", *goals], lines)


def _highest(found: Mapping[str, Sequence[float]]) -> str:
    lean = median(found["lean"])
    said = ", ".join(
        f"{NAMES.get(tool, tool)} {median(rates):,.0f}/s ({median(rates) / lean:.2f})"
        for tool, rates in found.items()
    )
    return (
        "The highest rate that the server saw, before the first rate more than 1 % below the "
        f"wanted rate: {said}. The goal is a ratio of 0.9. "
        "The server takes most of the two cores.\n"
    )


def _arrivals(results: Mapping[str, Any]) -> str:
    text = []
    for kind in ("constant", "poisson"):
        lines = []
        for key, found in results.items():
            if not key.startswith(kind) or key.split()[1] not in SHOWN_RATES:
                continue
            lean = found["lean"][0]["error_p99_ms"]
            for tool, runs in found.items():
                run = runs[0]
                error = run["error_p99_ms"]
                ratio = f" ({error / lean:.1f})" if error and tool in OURS else ""
                lines.append(
                    [
                        f"{key.split()[1]}/s",
                        NAMES.get(tool, tool),
                        f"{run['rate_per_s']:,.1f}/s",
                        f"{run['gap_cv']:.2f}",
                        "-" if error is None else f"{error:.2f} ms{ratio}",
                    ]
                )
        heads = ["asked", "tool", "rate", "CV of gaps", "p99 error (to lean)"]
        ideal = "0" if kind == "constant" else "1"
        text.append(f"{kind.capitalize()} arrivals: the CV of gaps should be {ideal}.\n")
        text.append(_table(heads, lines))
    return "\n".join(text)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    PAGE.write_text(page(json.loads(DATA.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
