"""Make the tables of docs/benchmarks/bench-policies.md from the results."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from arena_highest import HIGHEST_LOADS, STEP, Record
from arena_policies import FOREBAY, MODELS, POSSIBLE

from forebay.traces.errors import InputError

BEGIN, END = "<!-- generated: tests/bench/policies.py --write-docs -->", "<!-- end -->"
LONG = ("chat", "overload")  # kinds of workload that mix chats with long documents
WANTED_LOAD, WANTED_GOODPUT = 1.5, 3.0  # times the best model's, on the workloads of these kinds
Results = dict[str, dict[str, Record]]  # by workload, by policy


def write_docs(path: Path, records: Sequence[Record]) -> None:
    """Put the tables between the marks of `path`; raises InputError without marks."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{path}: the lines {BEGIN} and {END} are missing; put them back")
    made = "\n".join(tables(records))
    path.write_text(f"{head}{begin}\n\n{made}\n\n{end}{tail}", encoding="utf-8")


def tables(records: Sequence[Record]) -> Iterator[str]:
    bounds = {r["workload"]: r for r in records if r["policy"] == POSSIBLE}
    for chunk in sorted({record["chunk"] for record in records}):
        results: Results = {}
        for record in records:
            if record["chunk"] == chunk and record["policy"] != POSSIBLE:
                results.setdefault(record["workload"], {})[record["policy"]] = record
        compared = {
            load: by_policy
            for load, by_policy in results.items()
            if FOREBAY in by_policy and len(by_policy) > 1
        }
        flag = f"with `--long-prefill-token-threshold {chunk}`" if chunk else "with default flags"
        seeds = ", ".join(str(n) for n in sorted({r["seeds"] for r in records}))
        yield f"## Highest load, engines {flag}"
        yield ""
        yield f"Seeds of each workload: {seeds}. A + says that the search ended there."
        yield ""
        yield from _highest(compared, bounds)
        yield ""
        yield from _every_model(compared)
        yield ""
        yield f"## At twice the capacity, engines {flag}"
        yield ""
        yield from _goodput(compared, bounds)
        yield ""


def shown_load(record: Record) -> str:
    load = record["highest_load"]
    return "none" if load is None else f"{load:.2f}{'+' if record['capped'] else ''}"


def _highest(results: Results, bounds: dict[str, Record]) -> Iterator[str]:
    yield "| workload | Forebay | best model | Forebay / best | wanted | any scheduler, at most |"
    yield "| --- | --- | --- | --- | --- | --- |"
    met = 0
    for load, by_policy in results.items():
        ours, best = by_policy[FOREBAY], max(_peers(by_policy), key=_load)
        ratio = _ratio(_load(ours), _load(best))
        wanted = WANTED_LOAD if _is_long(load) else 1.0
        met += ratio * STEP >= wanted  # a grid's step is how exact the search is
        yield (
            f"| {load} | {shown_load(ours)} | {shown_load(best)} ({best['policy']}) | "
            f"{_bold(ratio, wanted / STEP)} | {wanted:g} | "
            f"{shown_load(bounds[load]) if load in bounds else '-'} |"
        )
    yield ""
    yield f"Wanted is met on {met} of {len(results)} workloads; in bold where it is not."


def _every_model(results: Results) -> Iterator[str]:
    names = [FOREBAY, *(n for n in MODELS if any(n in r for r in results.values()))]
    yield f"| workload | {' | '.join(names)} |"
    yield f"| --- |{' --- |' * len(names)}"
    for load, by_policy in results.items():
        cells = [shown_load(by_policy[n]) if n in by_policy else "-" for n in names]
        yield f"| {load} | {' | '.join(cells)} |"


def _goodput(results: Results, bounds: dict[str, Record]) -> Iterator[str]:
    yield (
        "| workload | Forebay: in time % (chats / documents) | rejected % | of the possible % | "
        "best model: in time % (chats / documents) | of the possible % | Forebay / best | wanted |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    met = 0
    for load, by_policy in results.items():
        ours, best = by_policy[FOREBAY], max(_peers(by_policy), key=_in_time)
        ratio = _ratio(_in_time(ours), _in_time(best))
        wanted = WANTED_GOODPUT if _is_long(load) else 1.0
        met += ratio >= wanted
        yield (
            f"| {load} | {_shares(ours)} | {_rejected(ours)} | {_of(ours, bounds.get(load))} | "
            f"{_shares(best)} ({best['policy']}) | {_of(best, bounds.get(load))} | "
            f"{_bold(ratio, wanted)} | {wanted:g} |"
        )
    yield ""
    yield f"Wanted is met on {met} of {len(results)} workloads; in bold where it is not."


def _peers(by_policy: dict[str, Record]) -> list[Record]:
    return [record for name, record in by_policy.items() if name in MODELS]


def _is_long(load: str) -> bool:
    return any(one.name == load and one.kind in LONG for one in HIGHEST_LOADS)


def _load(record: Record) -> float:
    return record["highest_load"] or 0.0


def _count(record: Record, what: str) -> int:
    return sum(kind[what] for kind in record["at_2x"].values())


def _in_time(record: Record) -> float:
    return float(_count(record, "in_time"))


def _rejected(record: Record) -> str:
    return f"{100 * _count(record, 'refused') / _count(record, 'requests'):.1f}"


def _of(record: Record, bound: Record | None) -> str:
    return "-" if bound is None else f"{100 * _in_time(record) / _in_time(bound):.1f}"


def _shares(record: Record) -> str:
    parts = [
        f"{100 * kind['in_time'] / kind['requests']:.1f}" if kind["requests"] else "-"
        for kind in record["at_2x"].values()
    ]
    return f"{100 * _in_time(record) / _count(record, 'requests'):.1f} ({' / '.join(parts)})"


def _ratio(ours: float, best: float) -> float:
    return ours / best if best else float("inf")


def _bold(ratio: float, wanted: float) -> str:
    return f"{ratio:.2f}" if ratio >= wanted else f"**{ratio:.2f}**"
