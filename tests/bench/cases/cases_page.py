"""The tables of docs/benchmarks/cases.md, from results/cases.json (make docs-figures)."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

TABLE = Path(__file__).parents[1] / "results" / "cases.json"
FOREBAY, ROUND_ROBIN, SPLIT = "forebay", "direct", "split"
FIGURES = (
    "requests", "in_time", "own_in_time", "refused", "refused_late", "admitted_late", "ttft_p50_s",
    "ttft_p90_s", "ttft_p99_s", "tpot_ms", "e2e_p50_s", "e2e_p99_s", "tokens_per_s", "hits",
)  # fmt: skip
LOADS = {
    "0.6": "0.6 of the capacity",
    "0.95": "0.95 of the capacity",
    "1.5": "1.5 times the capacity",
    "vendor": "the vendor's own load",
}
NAMES = {
    "least_connections": "least connections", "power_of_two": "power of two",
    "leastconn_8": "HAProxy 8", "leastconn_64": "HAProxy 64", "consistent_hash": "hash",
    "bounded_hash": "bounded hash", "cache_aware": "cache-aware", "smg_cache_aware": "SMG cache",
    "smg_prefix_hash": "SMG hash", "llm_d": "llm-d", "dynamo": "Dynamo",
    "dynamo_queues": "Dynamo queues", "lmetric": "LMetric", ROUND_ROBIN: "round robin",
    SPLIT: "split",
}  # fmt: skip
CELL = re.compile(r"(?P<case>\S+) (?P<load>\S+)(?P<flag> flag)? (?P<policy>\S+)")
LEVEL = 2.0  # points in time; smaller differences are noise
NEAR_BEST = 1.0  # points in time from the best policy: those whose other figures count
TIMES = 1.05
COMPARED = {"ttft_p90_s": "TTFT p90", "ttft_p99_s": "TTFT p99", "e2e_p50_s": "E2E p50"}
WORST = 5  # cells that are named
FEWEST = 1_000  # requests of a seed behind a p99 that is shown


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a policy in a cell: means over its seeds, and each seed's share in time."""

    policy: str
    values: dict[str, float]
    in_time: tuple[float, ...]
    commit: str

    def __getitem__(self, name: str) -> float:
        return self.values[name]


@dataclass(frozen=True, slots=True)
class CellResults:
    case: str
    load: str
    flag: bool
    results: dict[str, Result]

    @property
    def title(self) -> str:
        return f"{self.case}{', flag' if self.flag else ''}"

    @property
    def place(self) -> str:
        return f"{self.case} {self.load}{', flag' if self.flag else ''}"

    @property
    def ours(self) -> Result:
        return self.results[FOREBAY]

    @property
    def others(self) -> list[Result]:
        return [result for name, result in self.results.items() if name != FOREBAY]

    @property
    def best(self) -> Result:
        """Return the other policy that is most often in time, of equal ones the faster."""
        return max(self.others, key=lambda row: (round(row["in_time"], 1), -row["ttft_p90_s"]))

    @property
    def ahead(self) -> float:
        return self.ours["in_time"] - self.best["in_time"]

    @property
    def ahead_by_vendor(self) -> float:
        """Return the points in time by the vendor's target, beside its best other policy."""
        return self.ours["own_in_time"] - max(other["own_in_time"] for other in self.others)

    @property
    def is_behind(self) -> bool:
        """Return whether another policy is more often in time, by the page or the vendor."""
        return self.ahead_by_vendor < -LEVEL or self.ahead < -NEAR_BEST

    @property
    def slower(self) -> list[str]:
        """Return the times that are longer than the best, in words."""
        return [
            f"{words} {_pair(self.ours[figure], self.least(figure))}"
            for figure, words in COMPARED.items()
            if self.ours[figure] > TIMES * self.least(figure)
        ]

    def least(self, figure: str) -> float:
        """Return the least figure of all policies that are about as often in time as the best."""
        most = max(row["in_time"] for row in self.results.values())
        near = (row for row in self.results.values() if row["in_time"] >= most - NEAR_BEST)
        return min(row[figure] for row in near)


def read() -> list[CellResults]:
    """Read all cells that Forebay and another policy have played."""
    table: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    cells: dict[tuple[str, str, bool], dict[str, Result]] = {}
    for name, seeds in table.items():
        found = CELL.fullmatch(name)
        assert found is not None, name
        values = [dict(zip(FIGURES, listed, strict=True)) for _, listed in seeds.values()]
        means = {
            figure: fmean([v[figure] for v in values if v[figure] is not None] or [float("inf")])
            for figure in FIGURES
        }
        key = found["case"], found["load"], bool(found["flag"])
        cells.setdefault(key, {})[found["policy"]] = Result(
            found["policy"],
            means,
            tuple(v["in_time"] for v in values),
            next(iter(seeds.values()))[0],
        )
    return [
        CellResults(*key, results)
        for key, results in cells.items()
        if FOREBAY in results and len(results) > 1
    ]


def cases() -> str:
    """Return the counts, and for each load a table of the cells in which Forebay is behind."""
    cells = read()
    commits = sorted({cell.ours.commit for cell in cells})
    ours = {len(cell.ours.in_time) for cell in cells}
    others = {len(other.in_time) for cell in cells for other in cell.others}
    parts = [
        f"{len(cells)} cells. Forebay's policy of commit {', '.join(commits)}, "
        f"{_seeds(ours)}; other policies {_seeds(others)}.",
        "",
        *_goals(cells),
        "",
        *_behind(cells),
    ]
    for load, words in LOADS.items():
        title = f"{words[0].upper()}{words[1:]}"
        parts += ["", f"### {title}", "", *_table([cell for cell in cells if cell.load == load])]
    return "\n".join(parts)


def _kinds(cells: list[CellResults]) -> list[tuple[str, bool]]:
    """Return the loads with and without the flag that have cells, in the order of the page."""
    played = {(cell.load, cell.flag) for cell in cells}
    return [(load, flag) for load in LOADS for flag in (False, True) if (load, flag) in played]


def _seeds(counts: set[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{most} seed{'s' * (most > 1)}" if least == most else f"{least} to {most} seeds"


def _behind(cells: list[CellResults]) -> Iterator[str]:
    """List the cells in which another policy is more often in time, the worst first."""
    behind = sorted((cell for cell in cells if cell.ahead < -LEVEL), key=lambda cell: cell.ahead)
    words = [f"{cell.place} ({-cell.ahead:.0f}, {NAMES[cell.best.policy]})" for cell in behind]
    yield f"More than {LEVEL:g} points in time behind, in {len(behind)} cells: {'; '.join(words)}."
    yield ""
    for kind, of in (("admitted", "admitted"), ("refused", "requests")):
        figure = f"{kind}_late"
        worst = sorted(cells, key=lambda cell: -cell.ours[figure])[:WORST]
        words = [f"{cell.place} ({cell.ours[figure]:.3g})" for cell in worst]
        yield f"Most {kind} late, % of the {of}: {'; '.join(words)}."


GOALS: dict[str, Callable[[CellResults], bool]] = {
    "in time: at least the best other policy's - 1 point": lambda cell: cell.ahead >= -NEAR_BEST,
    **{
        f"{words}: at most 1.05 times the best": (
            lambda cell, figure=figure: cell.ours[figure] <= TIMES * cell.least(figure)  # type: ignore[misc]
        )
        for figure, words in COMPARED.items()
    },
    "admitted late: at most 2 % of the admitted": lambda cell: cell.ours["admitted_late"] <= 2.0,
    "refused late: at most 5 % of the refused": lambda cell: (
        cell.ours["refused_late"] <= 0.05 * cell.ours["refused"]
    ),
}


def _goals(cells: list[CellResults]) -> Iterator[str]:
    """Count the cells in which Forebay meets each goal."""
    kinds = _kinds(cells)
    groups = [cells, *([c for c in cells if (c.load, c.flag) == kind] for kind in kinds)]
    heads = ["all", *(f"{load}{', flag' if flag else ''}" for load, flag in kinds)]
    counted = [f"{head} ({len(group)})" for head, group in zip(heads, groups, strict=True)]
    yield f"| goal: cells that meet it (of) | {' | '.join(counted)} |"
    yield "| --- |" + " --- |" * len(groups)
    for words, met in GOALS.items():
        counts = [str(sum(map(met, group))) for group in groups]
        yield f"| {words} | {' | '.join(counts)} |"


def _table(cells: list[CellResults]) -> Iterator[str]:
    """List the cells in which Forebay is behind, the worst first, and name the others."""
    losses = [cell for cell in cells if cell.is_behind]
    if losses:
        yield (
            "| case | in time, %: Forebay | best other | TTFT p90, s | TTFT p99, s | E2E p50, s | "
            "refused (late), % | admitted late, % | vendor's target, % |"
        )
        yield "|" + " --- |" * 9
    for cell in sorted(losses, key=lambda cell: (cell.ahead, cell.case)):
        ours, best = cell.ours, cell.best
        spread = ""
        if max(ours.in_time) - min(ours.in_time) >= LEVEL:
            spread = f" ({min(ours.in_time):.1f} to {max(ours.in_time):.1f})"
        shown = f"{ours['in_time']:.1f}{spread}"
        few = ours["requests"] < FEWEST
        pairs = [
            "-" if few and "p99" in name else _pair(ours[name], best[name]) for name in COMPARED
        ]
        own = f"{ours['own_in_time']:.1f}, {ours['own_in_time'] - cell.ahead_by_vendor:.1f}"
        yield (
            f"| {cell.title} | {f'**{shown}**' if cell.ahead < -LEVEL else shown} "
            f"| {best['in_time']:.1f} {NAMES[best.policy]} "
            f"| {' | '.join(pairs)} | {ours['refused']:.3g} ({ours['refused_late']:.3g}) "
            f"| {ours['admitted_late']:.3g} | {own} |"
        )
    if losses:
        yield ""
    others = sorted((cell for cell in cells if not cell.is_behind), key=lambda cell: cell.title)
    slower = [f"{cell.title} ({', '.join(cell.slower)})" for cell in others if cell.slower]
    if slower:
        yield f"- Only slower (Forebay, the best; seconds): {'; '.join(slower)}."
    for flag, words in ((False, "No loss"), (True, "No loss with the flag")):
        named = [cell.case for cell in others if cell.flag == flag and not cell.slower]
        if named:
            yield f"- {words}: {', '.join(named)}."


def _pair(ours: float, best: float) -> str:
    return f"{ours:.3g}, {best:.3g}"
