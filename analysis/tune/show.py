"""Show the answer: on a terminal of 80 columns, and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import fill, wrap
from typing import Any

from forebay.analysis.statistics.units import numbered
from forebay.analysis.tune.figures import (
    BETTER,
    IN_TIME,
    LEVEL,
    PAUSE,
    SHARES,
    WORSE,
    OtherwiseRow,
    Repeat,
)
from forebay.analysis.tune.otherwise import Answer
from forebay.analysis.tune.setups import AS_IT_IS, FOREBAY, to_type

MOST_TRIPLES = 2
"""Up to this number of buckets the table shows p50, p95 and p99, beyond it only p99."""
WIDTH, NAMES = 80, 19
FAMILIES = (f"{AS_IT_IS}, ", f"{FOREBAY}, ")


def as_json(answer: Answer, source: str, remarks: Sequence[str]) -> dict[str, Any]:
    """Return all figures, times in seconds."""
    twin, best = answer.twin, answer.verdict.best
    return {
        "source": source,
        "requests": answer.requests,
        "span_s": answer.span_s,
        "requests_by_bucket": answer.in_buckets,
        "slos": [str(slo) for slo in answer.slos],
        "remarks": list(remarks),
        "verdict": answer.verdict.sentence,
        "best": best.set_up.name if best else None,
        "more": list(answer.verdict.more),
        "twin": {
            "compared": twin.compared,
            "fitted": answer.fitted,
            "in_time_observed": twin.in_time[0] if twin.in_time else None,
            "in_time_predicted": twin.in_time[1] if twin.in_time else None,
            "first_tokens": [
                {
                    "bucket": line.bucket,
                    "percentile": line.name,
                    "observed_s": line.observed_s,
                    "predicted_s": line.predicted_s,
                    "error": line.error,
                }
                for line in twin.lines
            ],
            "errors": dict(twin.errors),
            "error": twin.error,
            "error_in_time": twin.points,
            "why_not": twin.why_not or None,
        },
        "set_ups": [_row_json(row) for row in answer.rows],
        "impossible": answer.impossible,
    }


def _row_json(row: OtherwiseRow) -> dict[str, Any]:
    return {
        "name": row.set_up.name,
        "servers": row.set_up.scenario.gpus,
        "gpus": row.set_up.gpus,
        "refused": row.refused,
        "gpu_s": row.gpu_s,
        "per_million_tokens": row.per_million,
        "lost": row.set_up.lost or None,
        "to_type": to_type(row.set_up),
        "figures": {
            name: {**asdict(figure), "against": figure.against or None}
            for name, figure in row.figures.items()
        },
    }


def twin_lines(twin: Repeat, *, fitted: bool) -> Iterator[str]:
    """Yield lines about the twin's error."""
    if not twin.lines:
        if not twin.why_not:
            yield (
                "A trace does not say what happened, so the twin is not checked: differences below "
                f"{twin.error:.0%} are called level."
            )
        return
    how = ", its step times fitted to it" if fitted else ""
    seen, said = twin.in_time or (0.0, 0.0)
    yield (
        f"The twin repeats what happened{how}: {said:.1%} in time, {seen:.1%} observed "
        f"({twin.compared:,} requests)."
    )
    for bucket, error in twin.errors.items():
        pairs = [
            f"{line.name} {short(line.predicted_s)} ({short(line.observed_s)})"
            for line in twin.lines
            if line.bucket == bucket
        ]
        yield f"  {bucket}, first token in s (observed): {', '.join(pairs)}; off by {off_by(error)}"
    if not twin.why_not:
        yield f"Differences below these errors are called {LEVEL}."


def present(answer: Answer) -> str:
    """Name the model, the GPUs and the router of the present set-up."""
    base = answer.rows[0].set_up
    engine = base.scenario.engine
    return (
        f"{engine.model_name} on {numbered(base.gpus, 'GPU')} ({engine.gpu_spec.name}), "
        f"{numbered(base.scenario.gpus, 'server')}, router {base.scenario.policy}"
    )


def off_by(error: float) -> str:
    """Return an error in words: `12%`, or `a factor of 3.1`."""
    return f"{error:.0%}" if error < 1 else f"a factor of {1 + error:.3g}"


def print_answer(answer: Answer, remarks: Sequence[str], *, priced: bool) -> None:
    """Print the twin's error, the table, the verdict, and what to type."""
    for line in (*remarks, *twin_lines(answer.twin, fitted=answer.fitted)):
        print("\n".join(wrap(line, WIDTH, subsequent_indent="  " * line.startswith(" "))))
    print()
    if len(answer.rows) > 1:
        print("\n".join(table_lines(answer, priced=priced)))
        print(fill(_caption(answer, priced=priced), WIDTH) + "\n")
    for sentence in (answer.verdict.sentence, *answer.verdict.more):
        print(fill(sentence, WIDTH))
    if answer.verdict.best is not None:
        print("\n" + "\n".join(to_type(answer.verdict.best.set_up)))


def table_lines(answer: Answer, *, priced: bool) -> Iterator[str]:
    """Yield the lines of the table, of at most 80 characters with up to two buckets."""
    buckets = list(answer.in_buckets)
    shares = list(SHARES) if len(buckets) <= MOST_TRIPLES else ["p99"]
    wide = 5 * len(shares) - 1
    cost = "cost" if priced else "GPU s"
    heads = [f"{name[:wide]:>{wide}}" for name in buckets]
    percentiles = " ".join(f"{share:>4}" for share in shares)
    # The first line names columns, the second their parts.
    yield f"{'':{NAMES}} {'in':>5} {' '.join(heads)}  stop {'re-':>4} {'GPU':>5} {cost:>5}"
    below = " ".join(percentiles for _ in buckets)
    yield f"{'set-up':{NAMES}} {'time%':>5} {below} {'p99':>5} {'fus.':>4} {'s':>5} {'/M':>5}"
    for row in answer.rows:
        figures = row.figures
        name, in_time = table_name(row.set_up.name)[:NAMES], 100 * (figures[IN_TIME].value or 0)
        pause, gpu_s = short(figures[PAUSE].value), _large(row.gpu_s)
        cost = short(row.per_million) if priced else _large(row.per_million)
        times = [short(figures[f"{name}.ttft_{s}"].value) for name in buckets for s in shares]
        first = " ".join(f"{time:>4}" for time in times)
        rest = f"{pause:>5} {row.refused:>4} {gpu_s:>5} {cost:>5} {mark(row)}"
        yield f"{name:{NAMES}} {in_time:5.1f} {first} {rest}".rstrip()


def mark(row: OtherwiseRow) -> str:
    """Return a character for the comparison of a row with the present set-up."""
    better, worse, level = (row.those(against) for against in (BETTER, WORSE, LEVEL))
    if better and worse:
        return "~"
    return "+" if better else "-" if worse else "=" if level else ""


def _caption(answer: Answer, *, priced: bool) -> str:
    limits = ", ".join(map(str, answer.slos))
    cost = "cost" if priced else "held GPU seconds"
    return (
        f"{answer.requests:,} requests in {answer.span_s / 60:,.0f} min. {AS_IT_IS.capitalize()}: "
        f"{present(answer)}. In time: {limits}. First tokens by bucket and longest stop of an "
        f"answer in s; GPU s: computing; /M: {cost} per million output tokens. Beside as it is: + "
        "better, - worse, ~ both, = level. Intervals: --json and -o."
    )


def table_name(name: str) -> str:
    """Return the name as a line of the table shows it: below the set-up that it changes."""
    family = next((family for family in FAMILIES if name.startswith(family)), "")
    return f"  {name.removeprefix(family)}" if family else name


def _large(value: float | None) -> str:
    """Return a number in at most five characters: 6,751 as 6751, 123,456 as 123k."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value < 99_999.5 else f"{value / 1e3:.0f}k"


def short(value: float | None) -> str:
    """Return a number in at most four characters: .045, .45, 1.2, 12, 120."""
    if value is None:
        return "-"
    if value < 0.0995:
        return f"{value:.3f}"[1:] if value >= 0.0005 else "0"
    if value < 0.995:
        return f"{value:.2f}"[1:]
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"
