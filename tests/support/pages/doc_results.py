"""The measured figures of README.md and docs/benchmarks, from tests/bench/results.

Every figure that these pages quote is computed here, so no page can differ from the results.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import headline
from cases_page import FEWEST, NAMES
from guard import FOREBAY, MODELS
from headline import SAME, SECONDS, SEEDS, SPLIT, SUSTAINED, Cell, best_other
from paths import RESULTS
from result_lines import markdown_table
from routers.page import generated
from routers.plan import read_records

from forebay.analysis.statistics.quantiles import EQUAL_WITHIN
from forebay.replay.sim.scenario import DIRECT

GAP = "\u00a0"  # a number and its unit stay on one line
FLAG = "`--long-prefill-token-threshold 2048`"
LABELS = {FOREBAY: "Forebay", **{name: NAMES[name] for name in (*MODELS, SPLIT)}}
"""Each router that was played, by the name in the results."""
FLAGS = {"flag": "with the flag", "default": "default flags"}
LEVEL_POINTS = 1.0  # cases with a smaller difference of requests in time are only named
TRAFFIC = {
    "beside": "20 chats to each question about documents of 120,000 tokens, five questions each",
    "shared": "Two chats to three questions about 100 documents of 10,000 to 100,000 tokens",
}
LEAST = f"{100 * SUSTAINED:.0f}{GAP}%"
LOADS = ("50%", "80%")
BUCKETS = (("chats", "p99"), ("documents", "p99"))  # in README.md: all have 1,000 requests
CHARTED = headline.FLAGGED
LISTED = 3  # other routers with the highest loads: a table has them beside the two baselines
BASELINES = ("least_connections", DIRECT)  # what nginx does, and what clients do without a router
Routers = Mapping[str, Mapping[str, Any]]


def routers_of(cell: Cell) -> Routers:
    return headline.read()[cell.name]


def figure(value: float) -> str:
    """A number with two digits, or all digits before the point."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def spread(values: Sequence[float] | None, words: Callable[[float], str] = figure) -> str:
    """A figure of all seeds, and its range over seeds where each has enough requests for it."""
    if values is None:
        return "-"
    first, *ends = (words(value) for value in values)
    return f"{first} ({ends[0]}\u2013{ends[1]})" if ends else first


def percent(share: float) -> str:
    """A share in percent, with one decimal place from 90 % on."""
    return f"{share * 100:.1f}" if 0.9 <= share < 0.9995 else f"{share * 100:.0f}"


def sustains(at: Mapping[str, Any]) -> bool:
    return bool(min(at[name]["in_time"][0] for name in ("chats", "documents")) >= SUSTAINED)


def best_at(routers: Routers, load: str, bucket: str, name: str) -> str:
    """Return the other router with the lowest percentile, of those that sustain the load."""
    others = [router for router in routers if router != FOREBAY and sustains(routers[router][load])]
    return min(others, key=lambda router: float(routers[router][load][bucket][name][0]))


PROBLEMS = {
    "beside": "**A long document keeps a GPU busy for seconds, and chats wait.** "
    "Forebay keeps room for chats, and reads documents one after the other.",
    "shared": "**Many users ask about one document, and every GPU computes it.** "
    "Forebay sends a question to the GPU that holds the document.",
}


def problems() -> str:
    """Problems and figures as a Markdown table: one figure a row."""
    rows: list[tuple[str, str, str]] = []
    for traffic, problem in PROBLEMS.items():
        rows.append((problem, "", ""))
        for flags, words in FLAGS.items():
            rows += _figures(Cell(traffic, flags), words)
    rows += [*_overload(), *_pauses()]
    table = markdown_table(("", "best other router", "Forebay"), rows)
    return f"{_flag_alone()}\n\n{table}\n\n{_about()}"


def _flag_alone() -> str:
    """Say what the flag does for every router, at one load."""
    flag, default = (routers_of(Cell("beside", flags)) for flags in FLAGS)
    best = best_other(default)

    def pair(router: str, bucket: str) -> tuple[float, float]:
        """Return the p99 without the flag and with it."""
        return default[router]["80%"][bucket]["p99"][0], flag[router][SAME][bucket]["p99"][0]

    def both(router: str, bucket: str) -> str:
        return "from {} to {}".format(*map(figure, pair(router, bucket)))

    others = [name for name in LABELS if name != FOREBAY]
    halved = sum(after <= before / 2 for before, after in (pair(n, "chats") for n in others))
    return (
        f"vLLM's flag {FLAG} alone solves most of the first problem for chats. At "
        f"{figure(flag[best][SAME]['per_s'])} requests a second it at least halves the p99 of "
        f"their first token behind {halved} of {len(others)} other routers. Behind "
        f"{LABELS[best]}, the best one without it, it is {both(best, 'chats')} s. Documents share "
        f"each step then, and take longer: p99 {both(best, 'documents')} s. Behind Forebay, "
        f"chats go {both(FOREBAY, 'chats')} s and documents {both(FOREBAY, 'documents')} s."
    )


def _figures(cell: Cell, words: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a cell: the highest load, chats' p99 and documents' p90 at 80 %."""
    of = routers_of(cell)
    best = best_other(of)
    theirs, ours = (spread(of[router]["highest_per_s"]) for router in (best, FOREBAY))
    yield f"highest load, requests a second, {words}", f"{theirs} {LABELS[best]}", f"**{ours}**"
    at = figure(of[FOREBAY]["80%"]["per_s"])
    for bucket, name in BUCKETS:
        best = best_at(of, "80%", bucket, name)
        ours, theirs = (of[router]["80%"][bucket] for router in (FOREBAY, best))
        shown = spread(ours[name])
        yield (
            f"{bucket}' first token, {name}, s, at {at} a second",
            f"{spread(theirs[name])} {LABELS[best]}",
            f"**{shown}**" if ours[name][0] * (1 + EQUAL_WITHIN) < theirs[name][0] else shown,
        )


def _overload() -> Iterator[tuple[str, str, str]]:
    """Yield the rows about more load than any router sustains."""
    yield (
        "**Under overload the queue grows, until everybody is late.** Forebay predicts the wait, "
        "and answers 429 with `Retry-After` when it is too long.", "", "",
    )  # fmt: skip
    for flags, words in FLAGS.items():
        of = routers_of(Cell("shared", flags))
        best = max(
            (name for name in of if name != FOREBAY),
            key=lambda name: float(of[name]["overload"]["in_time"][0]),
        )
        theirs, ours = (
            spread(of[name]["overload"]["in_time"], percent) for name in (best, FOREBAY)
        )
        at = figure(of[FOREBAY]["overload"]["per_s"])
        yield (
            f"in time, %, after ten minutes of {at} requests a second, {words}",
            f"{theirs} {LABELS[best]}", f"**{ours}**",
        )  # fmt: skip


def _pauses() -> Iterator[tuple[str, str, str]]:
    """Yield the rows about the scheduler class."""
    yield (
        "**Inside vLLM, a long prompt fills whole steps, and answers pause.** [Forebay's scheduler "
        "class](docs/how-to/vllm-scheduler.md) bounds every step, with one option of `vllm serve`.",
        "", "",
    )  # fmt: skip
    flag, with_class = (routers_of(Cell("beside", flags)) for flags in ("flag", "class"))
    at = figure(flag[FOREBAY]["80%"]["per_s"])
    others = [name for name in flag if name != FOREBAY and sustains(flag[name]["80%"])]
    best = min(others, key=lambda name: float(flag[name]["80%"]["pause_p99"][0]))
    theirs, ours = (spread(of["80%"]["pause_p99"]) for of in (flag[best], with_class[FOREBAY]))
    yield (
        f"longest pause in an answer, p99, s, at {at} a second; Forebay with the class, the other "
        "with the flag", f"{theirs} {LABELS[best]}", f"**{ours}**",
    )  # fmt: skip


def _about() -> str:
    cells = [routers_of(Cell(traffic, flags)) for traffic in PROBLEMS for flags in FLAGS]
    counts = [cell[FOREBAY]["80%"] for cell in cells]
    chats = [at["chats"]["requests"] for at in counts]
    documents = [at["documents"]["requests"] for at in counts]
    commits = sorted({cell[FOREBAY]["commit"] for cell in cells})
    return (
        f"Virtual time: two simulated H200 GPUs, Llama-3-8B, **models** of {len(LABELS) - 1} "
        f"routers and Forebay's policy of commit {', '.join(commits)}. A load is sustained if "
        f"{LEAST} of the chats have their first token within 2 s and {LEAST} of "
        "the documents within 15 s. Latencies are at 80 % of what the best other router sustains, "
        "of the best router that sustains it. In brackets: the range over "
        f"{SEEDS} seeds, where each has 1,000 requests for a p99. *Split* is one GPU for chats and "
        f"one for documents. Behind each latency are {min(chats):,} to {max(chats):,} chats and "
        f"{min(documents):,} to {max(documents):,} documents."
    )


SCHEDULER_ROWS = (
    ("vLLM alone, round robin, with the flag", "flag", DIRECT),
    ("best other router, with the flag", "flag", ""),
    ("Forebay, with the flag", "flag", FOREBAY),
    ("vLLM alone, with the scheduler class", "class", DIRECT),
    ("**Forebay, with the scheduler class**", "class", FOREBAY),
)


def scheduler() -> str:
    """A table of what the scheduler class adds."""
    rows = []
    for label, flags, router in SCHEDULER_ROWS:
        of = routers_of(Cell("beside", flags))
        at = of[router or best_other(of)]["80%"]
        rows.append(
            (label, spread(at["chats"]["p99"]), spread(at["pause_p99"]),
             spread(at["documents"]["p99"]), spread(at["in_time"], percent))
        )  # fmt: skip
    heads = ("seconds", "chats' first token, p99", "longest pause in an answer, p99",
             "documents' first token, p99", "in time, %")  # fmt: skip
    flag = routers_of(CHARTED)
    return (
        f"{markdown_table(heads, rows)}\n\n{TRAFFIC['beside']}, at "
        f"{figure(flag[FOREBAY]['80%']['per_s'])} requests a second: 80 % of what "
        f"{LABELS[best_other(flag)]} sustains, the best other router. Virtual time, two simulated "
        f"H200 GPUs, {_counts(flag[FOREBAY]['80%'])}, {SEEDS} seeds; their range is in brackets. "
        f"*The flag* is vLLM's {FLAG}."
    )


def _counts(at: Mapping[str, Any]) -> str:
    chats, documents = (at[name]["requests"] for name in ("chats", "documents"))
    return f"{chats:,} chats and {documents:,} documents"


def scheduler_cases() -> str:
    """A table of the cases of other projects behind Forebay, with the class and without it."""
    text = (RESULTS / "cases-class.jsonl").read_text(encoding="utf-8")
    cells: dict[tuple[str, float], dict[str, dict[str, float]]] = {}
    for row in map(json.loads, text.splitlines()):
        cells.setdefault((row["case"], row["load"]), {})[row["set_up"]] = row
    rows = []
    order = ("class", "flag", "default")
    slower, level, ahead = list[str](), list[str](), list[str]()
    for (case, load), of in sorted(cells.items(), key=lambda c: _lead(c[1])):
        if _lead(of) > -LEVEL_POINTS:
            near = slower if _slower(of) else level
            (near if _lead(of) < LEVEL_POINTS else ahead).append(f"{case} {load:g}")
            continue
        shown = [
            " / ".join("-" if (v := of[name][key]) is None else f"{v:.{places}f}" for name in order)
            if of["class"]["requests"] >= FEWEST or "p99" not in key
            else "-"
            for key, places in (("in_time", 1), ("chat_p99", 2), ("long_p99", 1), ("e2e_p50_s", 1))
        ]
        rows.append((f"{case} {load:g}", *shown))
    heads = ("case, load", "in time, percent", "chats' p99", "long prompts' p99", "E2E p50")
    named = (
        f"Within 1 point of the better of the two: {', '.join(level)}. The same, but with a time "
        f"that is over 5 % longer: {', '.join(slower)}. More than 1 point ahead: "
        f"{', '.join(ahead)}."
    )
    return f"{markdown_table(heads, rows)}\n\n{named}"


def _lead(of: Mapping[str, Mapping[str, float]]) -> float:
    """Return the points in time by which the class is ahead of both other set-ups."""
    return of["class"]["in_time"] - max(of[name]["in_time"] for name in ("flag", "default"))


def _slower(of: Mapping[str, Mapping[str, float]]) -> bool:
    """True if a time with the class is 5 % longer than with the better of the other set-ups."""
    return any(
        of["class"][key] > (1 + EQUAL_WITHIN) * min(of[name][key] for name in ("flag", "default"))
        for key in ("chat_p99", "long_p99", "e2e_p50_s")
        if of["class"][key] is not None
    )


def words() -> str:
    """Name the figures in which another router is better than Forebay."""
    behind = []
    for traffic in TRAFFIC:
        for flags, name_of_flags in FLAGS.items():
            of = routers_of(Cell(traffic, flags))
            for load, bucket, name in product(LOADS, ("chats", "documents"), ("p50", "p90", "p99")):
                if of[FOREBAY][load][bucket][name] is None:
                    continue
                best = best_at(of, load, bucket, name)
                ours, theirs = (of[router][load][bucket][name][0] for router in (FOREBAY, best))
                if ours > theirs * (1 + EQUAL_WITHIN):
                    behind.append(
                        f"- {bucket}' {name}, *{SHORT[traffic]}*, {name_of_flags}, at "
                        f"{load[:2]} %: {figure(ours)} s, {LABELS[best]} {figure(theirs)} s"
                    )
    if not behind:
        return "No other router that sustains the load is more than 5 % faster."
    first = "Of the routers that sustain the load, another one is more than 5 % faster here:"
    return "\n".join([first, "", *behind])


SHORT = {"beside": "chats beside documents", "shared": "shared documents"}


def tables() -> str:
    """The tables of docs/benchmarks/results.md: the routers that matter, at both loads."""
    cells = [(traffic, flags) for traffic in TRAFFIC for flags in FLAGS]
    return "\n\n".join(_table(Cell(*cell)) for cell in cells)


def _table(cell: Cell) -> str:
    heads = ("router", "highest load", "chats p90, s", "p99", "documents p90", "p99",
             "chats in time, %", "documents")  # fmt: skip
    of = routers_of(cell)
    rows = []
    ranked = sorted(LABELS, key=lambda name: -float(of[name]["highest_per_s"][0]))
    others = [name for name in ranked if name != FOREBAY]
    for name in ranked:
        if name not in {FOREBAY, *others[:LISTED], *BASELINES}:
            continue
        most = of[name]["80%"]
        shown = [spread(most[b][p]) for b in ("chats", "documents") for p in ("p90", "p99")]
        shown += [spread(most[bucket]["in_time"], percent) for bucket in ("chats", "documents")]
        rows.append((LABELS[name], spread(of[name]["highest_per_s"]), *shown))
    most = of[FOREBAY]["80%"]
    return (
        f"### {SHORT[cell.traffic].capitalize()}, {FLAGS[cell.flags]}\n\n"
        f"{TRAFFIC[cell.traffic]}, at {most['per_s']:.3g} requests a second: 80 % of what "
        f"{LABELS[best_other(of)]} sustains, the best other router. {_counts(most)}, {SEEDS} seeds "
        f"of {SECONDS[cell.traffic] / 60:.0f} minutes.\n\n{markdown_table(heads, rows)}"
    )


def fleets() -> str:
    """A table of one, two and four GPUs, behind Forebay and asked in turn by clients."""
    rows = []
    for flags, words in (*FLAGS.items(), ("class", "the scheduler class")):
        for gpus in (1, 2, 4):
            of = routers_of(Cell("beside", flags, gpus))
            ours, alone = of[FOREBAY]["80%"], of[DIRECT]["80%"]
            pairs = [
                f"{spread(ours[bucket][name])}, {spread(alone[bucket][name])}"
                for bucket, name in (("chats", "p99"), ("documents", "p90"))
            ]
            shares = [percent(at[b]["in_time"][0]) for b in ("chats", "documents")
                      for at in (ours, alone)]  # fmt: skip
            rows.append(
                (str(gpus), words, figure(ours["per_s"]), *pairs, ", ".join(shares[:2]),
                 ", ".join(shares[2:]), percent(ours["rejected"]))
            )  # fmt: skip
    heads = ("GPUs", "flags", "requests a second", "chats' p99, s", "documents' p90, s",
             "chats in time, %", "documents in time, %", "Forebay rejected, %")  # fmt: skip
    return markdown_table(heads, rows)


def models() -> str:
    """A table of the models of other routers."""
    rows = [(LABELS[name], about.removeprefix("model of ")) for name, about in MODELS.items()]
    return markdown_table(("name", "model of"), rows)


def live() -> str:
    """Where the measurements with real routers are, with their dates, number and seeds."""
    records = read_records(RESULTS / "bench-routers.jsonl.gz")
    valid = [record for record in records if record.get("verdict") == "valid"]
    seeds = Counter((record["workload"], record["router"]) for record in valid).values()
    chats = [record["figures"]["ttft"]["chat"]["requests"] for record in valid]
    versions = sorted({record["version"] for record in valid if record["router"] == FOREBAY})
    dates = sorted({record["date"][:10] for record in valid})
    return (
        "[All runs](bench-routers.md) has the real routers with real sockets in front of "
        f"simulated servers: {len(valid)} valid runs of {' and '.join(dates)}, {min(seeds)} to "
        f"{max(seeds)} seeds of a router, {min(chats)} to {max(chats)} chats a run. Forebay had an "
        f"older policy then ({', '.join(versions)})."
    )


def all_runs() -> str:
    """The tables of docs/benchmarks/bench-routers.md."""
    return generated(read_records(RESULTS / "bench-routers.jsonl.gz"))
