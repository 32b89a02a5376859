"""Make the tables of docs/benchmarks/bench-policies.md from the results."""

from collections.abc import Iterator, Sequence

from arena_highest import HIGHEST_LOADS, STEP, Record
from arena_policies import FOREBAY, MODELS, POSSIBLE

LONG = ("chat", "overload")  # kinds of workload that mix chats with long documents
WANTED_LOAD, WANTED_GOODPUT = 1.5, 3.0  # times the best model's, on the workloads of these kinds
Results = dict[str, dict[str, Record]]  # by workload, by policy


def page(records: Sequence[Record]) -> str:
    """Return the generated part of docs/benchmarks/bench-policies.md."""
    return "\n".join(tables(records)).strip("\n")


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
        yield f"## Engines {flag}"
        yield ""
        yield from _compared(compared, bounds)
        yield ""


def shown_load(record: Record) -> str:
    load = record["highest_load"]
    return "none" if load is None else f"{load:.2f}{'+' if record['capped'] else ''}"


def _compared(results: Results, bounds: dict[str, Record]) -> Iterator[str]:
    yield (
        "| workload | highest load: Forebay | best model | any scheduler, at most | "
        "in time at 2, %: Forebay | best model | of the possible, % |"
    )
    yield "|" + " --- |" * 7
    met = [0, 0]
    perfect = []
    for load, by_policy in results.items():
        ours, peers = by_policy[FOREBAY], _peers(by_policy)
        best, best_at_2 = max(peers, key=_load), max(peers, key=_in_time)
        ratios = _ratio(_load(ours), _load(best)), _ratio(_in_time(ours), _in_time(best_at_2))
        # A grid's step is how exact the search is.
        wanted = (WANTED_LOAD / STEP, WANTED_GOODPUT) if _is_long(load) else (1 / STEP, 1.0)
        met = [n + (ratio >= least) for n, ratio, least in zip(met, ratios, wanted, strict=True)]
        if all(map(_is_perfect, (ours, best, best_at_2))):
            perfect.append(load)
            continue
        bound = bounds.get(load)
        yield (
            f"| {load} | {_bold(shown_load(ours), ratios[0], wanted[0])} | "
            f"{shown_load(best)} ({best['policy']}) | {shown_load(bound) if bound else '-'} | "
            f"{_bold(_share(ours), ratios[1], wanted[1])} | "
            f"{_share(best_at_2)} ({best_at_2['policy']}) | {_of(ours, bound)} |"
        )
    yield ""
    yield (
        f"The aim is met on {met[0]} of {len(results)} workloads for the highest load, "
        f"and on {met[1]} at twice the capacity."
    )
    if perfect:
        yield f"Not shown, as no figure of Forebay or a model can rise: {', '.join(perfect)}."


def _peers(by_policy: dict[str, Record]) -> list[Record]:
    return [record for name, record in by_policy.items() if name in MODELS]


def _is_perfect(record: Record) -> bool:
    """True if the search ended at its highest load, and all requests were in time."""
    return bool(record["capped"]) and _in_time(record) == _count(record, "requests")


def _is_long(load: str) -> bool:
    return any(one.name == load and one.kind in LONG for one in HIGHEST_LOADS)


def _load(record: Record) -> float:
    return record["highest_load"] or 0.0


def _count(record: Record, what: str) -> int:
    return sum(kind[what] for kind in record["at_2x"].values())


def _in_time(record: Record) -> float:
    return float(_count(record, "in_time"))


def _of(record: Record, bound: Record | None) -> str:
    return "-" if bound is None else f"{100 * _in_time(record) / _in_time(bound):.1f}"


def _share(record: Record) -> str:
    return f"{100 * _in_time(record) / _count(record, 'requests'):.1f}"


def _ratio(ours: float, best: float) -> float:
    return ours / best if best else float("inf")


def _bold(figure: str, ratio: float, wanted: float) -> str:
    return figure if ratio >= wanted else f"**{figure}**"
