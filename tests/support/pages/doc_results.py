"""The measured figures of README.md and docs/benchmarks, from tests/bench/results.

Every figure that these pages quote is computed here, so no page can differ from the results.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape

from arena_policies import FOREBAY, MODELS
from paths import RESULTS
from result_lines import markdown_table, read_lines
from routers.page import generated
from routers.plan import Record, read_records
from routers.results import Entry, groups

GROUP = ("sim", 2, "Llama-3-8B", "chat")
OURS = "forebay"
GAP = "\u00a0"  # a number and its unit stay on one line
FEWEST = 1  # valid runs of a figure that is shown
FLAG = "`--long-prefill-token-threshold 2048`"
LABELS = {
    "forebay": "Forebay",
    "vllm-router cache_aware": "vLLM router, cache aware",
    "smg cache_aware": "SMG, cache aware",
    "haproxy by length": "HAProxy, by length",
    "nginx least_conn": "nginx, least connections",
    "direct": "round robin, no router",
}
"""The routers that every workload of the core was run with, by the name in the results."""
OTHERS = [name for name in LABELS if name != OURS]
SHORT = {
    "forebay": "Forebay",
    "vllm-router cache_aware": "vLLM router",
    "smg cache_aware": "SMG",
    "haproxy by length": "HAProxy",
    "nginx least_conn": "nginx",
    "direct": "round robin",
}
WORKLOADS = {
    "documents": "chats beside documents, 80 %",
    "documents, chunked": "chats beside documents, 80 %, with the flag",
    "shared documents": "shared documents, 80 %",
    "shared documents, chunked": "shared documents, 80 %, with the flag",
}
BUCKETS = ("chat", "document")
COMPARABLE = 0.6
"""Of Forebay's share in time. A router with fewer answered only part of the requests, or most of
them late: its latency stands in the tables, and in no comparison."""
OVERLOADED = "chats and documents"
"""The workload of bench-policies.jsonl.gz at twice the capacity, which `tests/bench/policies.py` of
commit 2d525ee5 measured in virtual time."""
LEVEL = 0.05  # figures that differ by less count as equal
LEVEL_POINTS = 0.5  # cases with a smaller difference of requests in time are only named
THEMES = {
    "light": {"text": "#1f2328", "soft": "#59636e", "ours": "#0969da", "other": "#b6bfc9"},
    "dark": {"text": "#e6edf3", "soft": "#9198a1", "ours": "#4493f8", "other": "#4b5561"},
}


@dataclass(frozen=True, slots=True)
class Results:
    """The latest runs of each router, by workload and name."""

    entries: dict[tuple[str, str], Entry]
    records: Sequence[Record]

    def p99_s(self, workload: str, router: str, bucket: str) -> float | None:
        """The 99th percentile of the time to first token, or None without a valid run."""
        entry = self.entries.get((workload, router))
        estimate = entry.ttft(bucket, 0.99) if entry and len(entry.valid) >= FEWEST else None
        return estimate.value if estimate else None

    def mean(self, workload: str, router: str, figure: str) -> float | None:
        """The mean over seeds, or None without a valid run."""
        entry = self.entries.get((workload, router))
        estimate = entry.mean(figure) if entry and len(entry.valid) >= FEWEST else None
        return estimate.value if estimate else None

    def comparable(self, workload: str, router: str) -> bool:
        """True unless it rejected or delayed too many requests for its latency to count."""
        ours, theirs = (self.mean(workload, name, "attainment") for name in (OURS, router))
        return theirs is not None and theirs >= COMPARABLE * (ours or 0.0)

    def best_p99_s(self, workload: str, bucket: str) -> float | None:
        """The lowest p99 of the other routers whose latency can be compared."""
        names = [name for name in OTHERS if self.comparable(workload, name)]
        values = [self.p99_s(workload, name, bucket) for name in names]
        return min((value for value in values if value is not None), default=None)

    def dates(self) -> str:
        days = sorted(record["date"][:10] for record in self.records)
        return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"

    def seeds(self) -> str:
        """The fewest and the most valid runs of a figure in the tables."""
        counts = [
            len(entry.valid) for (workload, router), entry in self.entries.items()
            if workload in WORKLOADS and router in LABELS and len(entry.valid) >= FEWEST
        ]  # fmt: skip
        fewest, most = min(counts), max(counts)
        return str(most) if fewest == most else f"{fewest} to {most}"


@cache
def results() -> Results:
    """The committed results: of each workload the seeds that all its routers have."""
    everything = groups(read_records(RESULTS / "bench-routers.jsonl.gz"))[GROUP]
    entries = [
        entry for entry in everything if entry.workload in WORKLOADS and entry.router in LABELS
    ]
    seeds: dict[str, set[int]] = {}
    for entry in entries:
        if valid := {record["seed"] for record in entry.valid}:
            seeds[entry.workload] = seeds.get(entry.workload, valid) & valid
    entries = [
        replace(entry, records=[r for r in entry.records if r["seed"] in seeds[entry.workload]])
        for entry in entries
    ]
    records = [record for entry in entries for record in entry.valid]
    return Results({(entry.workload, entry.router): entry for entry in entries}, records)


def seconds(value: float | None) -> str:
    """Two decimal places below one second, else one. `-` where nothing was measured."""
    if value is None:
        return "-"
    return f"{value:.2f}{GAP}s" if value < 1 else f"{value:.1f}{GAP}s"


def percent(share: float | None) -> str:
    """A share in percent, with one decimal place above 99 %. `-` where nothing was measured."""
    if share is None:
        return "-"
    places = 1 if 0.99 <= share < 1 else 0
    return f"{share * 100:.{places}f}{GAP}%"


@dataclass(frozen=True, slots=True)
class Chart:
    """A bar chart of one figure by router. `least` is True if less is better."""

    workload: str
    title: str
    about: str
    figure: Callable[[str, str], float | None]
    spoken: Callable[[float | None], str]
    least: bool

    def bars(self) -> list[tuple[str, float]]:
        """Router and value, the best router first."""
        names = [name for name in LABELS if results().comparable(self.workload, name)]
        pairs = [(name, self.figure(self.workload, name)) for name in names]
        figures = [(name, value) for name, value in pairs if value is not None]
        return sorted(figures, key=lambda bar: bar[1] if self.least else -bar[1])

    def text(self) -> str:
        """The chart in words, for readers who cannot see it."""
        phrases = (f"{LABELS[name]} {self.spoken(value)}" for name, value in self.bars())
        return f"{self.title}. {'; '.join(phrases)}. {self.about}"


def charts() -> dict[str, Chart]:
    """The charts, by the beginning of their files' names."""
    setting = "Two simulated H200 GPUs at {} load, Llama-3-8B, chats beside 120k-token documents"
    return {
        "chat-p99": Chart(
            "shared documents, chunked",
            "Chats: time to first token, 99th percentile (less is better)",
            "Two simulated H200 GPUs at 80 % load, Llama-3-8B, chats beside 16 shared documents "
            "of 10k to 100k tokens, vLLM with the flag. Not shown: routers that rejected many.",
            lambda workload, router: _p99(workload, router, "chat"), seconds, True,
        ),
        "document-p99": Chart(
            "documents, chunked",
            "Documents: time to first token, 99th percentile (less is better)",
            f"{setting.format('80 %')}, vLLM with the flag.",
            lambda workload, router: _p99(workload, router, "document"), seconds, True,
        ),
    }  # fmt: skip


LEFT, WIDTH, ROW, TOP = 200, 720, 30, 42  # of a chart, in pixels


def chart(name: str, theme: str) -> str:
    """One chart as a stand-alone SVG."""
    drawn, colours = charts()[name], THEMES[theme]
    bars = drawn.bars()
    most = max(value for _, value in bars)
    height = TOP + ROW * len(bars) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'width="{WIDTH}" height="{height}" '
        'font-family="-apple-system,\'Segoe UI\',Helvetica,Arial,sans-serif" font-size="14">',
        f"<title>{escape(drawn.text())}</title>",
        f'<text x="0" y="18" font-weight="600" fill="{colours["text"]}">'
        f"{escape(drawn.title)}</text>",
    ]
    for number, (router, value) in enumerate(bars):
        y = TOP + ROW * number
        length = max((WIDTH - LEFT - 70) * value / most, 2.0)
        ours = router == OURS
        weight = ' font-weight="600"' if ours else ""
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end"{weight} '
            f'fill="{colours["text"]}">{escape(LABELS[router])}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="20" rx="2" '
            f'fill="{colours["ours" if ours else "other"]}"/>',
            f'<text x="{LEFT + length + 8:.1f}" y="{y + 15}"{weight} '
            f'fill="{colours["text"]}">{drawn.spoken(value)}</text>',
        ]
    parts.append(
        f'<text x="0" y="{height - 8}" font-size="12" fill="{colours["soft"]}">'
        f"{escape(drawn.about)}</text></svg>\n"
    )
    return "\n".join(parts)


def problems() -> str:
    """Three problems, three mechanisms, three figures, as a Markdown table."""
    rows = [
        "| problem | what Forebay does | with the flag | default flags |",
        "| --- | --- | --- | --- |",
        "| A long document keeps a GPU busy for seconds. Chats wait behind it. "
        "| It keeps room for chats while documents are read. | Chat p99 and document p99: "
        f"{_both('documents, chunked')} | {_both('documents')} |",
        "| Many users ask about one document. Every GPU computes it again. "
        "| It sends a question to the GPU that holds the document. A shared document is computed "
        "once, and again only where a free GPU then answers faster. | Chat p99 and document p99: "
        f"{_both('shared documents, chunked')} | {_both('shared documents')} |",
        "| Under overload the queue grows, until everybody is late. "
        "| It predicts the wait, and answers 429 with `Retry-After` when it is too long. "
        f"| In time at 200 % load, virtual time: {_in_time(2_048)} | {_in_time(0)} |",
    ]
    about = (
        f"*The flag* is vLLM's {FLAG}. Each cell: Forebay, then the best other router, in virtual "
        f"time the best model of a router. Two simulated H200 GPUs, {results().dates()}."
    )
    return "\n".join([*rows, "", about])


SCHEDULER_CELL = "2 GPUs, 80%"
SCHEDULER_ROWS = {
    "alone, flag": "vLLM alone, round robin, with the flag",
    "": "best model of another router, with the flag",
    "Forebay, flag": "Forebay, with the flag",
    "alone, class": "vLLM alone, with the scheduler class",
    "Forebay, class": "**Forebay, with the scheduler class**",
}


def scheduler() -> str:
    """A table of what the scheduler class adds, from `tests/bench/engine_step.py`."""
    cells = json.loads((RESULTS / "engine-step.json").read_text(encoding="utf-8"))
    models = (cells[key] for m in MODELS if (key := f"{SCHEDULER_CELL}, {m}, flag") in cells)
    best = max(models, key=lambda cell: float(cell["in_time"]))
    rows = []
    for key, label in SCHEDULER_ROWS.items():
        cell = cells[f"{SCHEDULER_CELL}, {key}"] if key else best
        chats, documents = (
            " / ".join(f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in cell[name])
            for name in ("chats_s", "documents_s")
        )
        pause, share = cell["pause_s"][0], 100 * cell["in_time"]
        rows.append((label, chats, f"{pause:.2g}", documents, f"{share:.1f}"))
    heads = ("seconds", "chats p50 / p90 / p99", "longest pause in an answer, p99",
             "documents p50 / p99", "in time, percent")  # fmt: skip
    about = (
        "Virtual time, two simulated H200 GPUs at 80 % load, seeds 0 to 4: chats beside "
        "120,000-token documents, about which five questions each are asked. *The flag* is vLLM's "
        f"{FLAG}. The router is the one of {len(MODELS)} models with the most requests in time."
    )
    return f"{markdown_table(heads, rows)}\n\n{about}"


def scheduler_cases() -> str:
    """A table of the cases of other projects behind Forebay, with the class and without it."""
    text = (RESULTS / "cases-class.jsonl").read_text(encoding="utf-8")
    cells: dict[tuple[str, float], dict[str, dict[str, float]]] = {}
    for row in map(json.loads, text.splitlines()):
        cells.setdefault((row["case"], row["load"]), {})[row["set_up"]] = row
    rows = []
    order = ("class", "flag", "default")
    level = []
    for (case, load), of in sorted(cells.items(), key=lambda c: _lead(c[1])):
        if abs(_lead(of)) < LEVEL_POINTS and not _slower(of):
            level.append(f"{case} {load:g}")
            continue
        shown = [
            " / ".join("-" if (v := of[name][key]) is None else f"{v:.{places}f}" for name in order)
            for key, places in (("in_time", 1), ("chat_p99", 2), ("long_p99", 1), ("e2e_p50_s", 1))
        ]
        rows.append((f"{case} {load:g}", *shown))
    heads = ("case, load", "in time, percent", "chats' p99", "long prompts' p99", "E2E p50")
    named = (
        f"Within {LEVEL_POINTS:g} points of the better of the two, and not 5 % slower than it: "
        f"{', '.join(level)}."
    )
    return f"{markdown_table(heads, rows)}\n\n{named}"


def _lead(of: Mapping[str, Mapping[str, float]]) -> float:
    """Return the points in time by which the class is ahead of both other set-ups."""
    return of["class"]["in_time"] - max(of[name]["in_time"] for name in ("flag", "default"))


def _slower(of: Mapping[str, Mapping[str, float]]) -> bool:
    """True if a time with the class is 5 % longer than with the better of the other set-ups."""
    return any(
        of["class"][key] > (1 + LEVEL) * min(of[name][key] for name in ("flag", "default"))
        for key in ("chat_p99", "long_p99", "e2e_p50_s")
        if of["class"][key] is not None
    )


def _both(workload: str) -> str:
    """Return the p99s of chats and documents, each ours and the best other router's."""
    pairs = ((_p99(workload, OURS, bucket), _best(workload, bucket)) for bucket in BUCKETS)
    return ", ".join(f"**{seconds(ours)}** / {seconds(theirs)}" for ours, theirs in pairs)


def _in_time(chunk: int) -> str:
    """Return the shares in time at twice the capacity, ours and the best model's."""
    shares = {
        record["policy"]: _share_of(record["at_2x"])
        for record in map(json.loads, read_lines(RESULTS / "bench-policies.jsonl.gz"))
        if (record["workload"], record["chunk"]) == (OVERLOADED, chunk) and record["at_2x"]
    }
    models = [share for policy, share in shares.items() if policy in MODELS]
    return f"**{percent(shares[FOREBAY])}** / {percent(max(models))}"


def _share_of(kinds: Mapping[str, Mapping[str, int]]) -> float:
    requests = sum(kind["requests"] for kind in kinds.values())
    return sum(kind["in_time"] for kind in kinds.values()) / requests


def compare(ours: float | None, theirs: float | None) -> float | None:
    """Their figure as a multiple of ours. 1 where they are level, None where either is unknown."""
    if not ours or theirs is None:
        return None
    return 1.0 if abs(theirs / ours - 1) < LEVEL else theirs / ours


def words() -> str:
    """Name the p99s in which another router is better than Forebay."""
    behind = [
        f"{bucket}s in *{label}*"
        for workload, label in WORKLOADS.items()
        for bucket in BUCKETS
        if (compare(_p99(workload, OURS, bucket), _best(workload, bucket)) or 1.0) < 1
    ]
    first = ", ".join(behind[:-1])
    named = f"{first} and {behind[-1]}" if first else "".join(behind)
    better = f"Another router's p99 is lower for {named}."
    return better if behind else "No other router has a lower p99 here."


def all_runs() -> str:
    """The tables of docs/benchmarks/bench-routers.md."""
    return generated(read_records(RESULTS / "bench-routers.jsonl.gz"))


def tables() -> str:
    """The table of docs/benchmarks/results.md."""
    rows = []
    for workload, label in WORKLOADS.items():
        cells = [
            f"{seconds(_p99(workload, router, 'chat'))}, "
            f"{seconds(_p99(workload, router, 'document'))}; "
            f"{percent(results().mean(workload, router, 'attainment'))}"
            for router in LABELS
        ]
        rows.append((label, *cells))
    about = (
        f"Valid runs in each cell: {results().seeds()}, of the same seeds for all routers. Dates: "
        f"{results().dates()}. A dash: not run, or no valid run."
    )
    return f"{markdown_table(('traffic', *SHORT.values()), rows)}\n\n{about}"


def _p99(workload: str, router: str, bucket: str) -> float | None:
    return results().p99_s(workload, router, bucket)


def _best(workload: str, bucket: str) -> float | None:
    return results().best_p99_s(workload, bucket)


def picture() -> str:
    """The chart in README.md, in the reader's colours."""
    dark, light = (f"docs/assets/chat-p99-{theme}.svg" for theme in ("dark", "light"))
    description = escape(charts()["chat-p99"].text())
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'  <img src="{light}" alt="{description}"></picture>'
    )
