"""Print for the commands of `forebay traces`, and add up a trace on its way to a file."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from forebay.traces.edit.describe import Description
from forebay.traces.edit.sharing import IdealCache
from forebay.traces.ground.command_line.messages import print_json, talk
from forebay.traces.ground.errors import InputError, escaped
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.whole_file import refuse_existing, whole_file, write_meta


class Totals:
    """Passes requests on and adds them up, with a cache also their ideal hit ratio.

    `if_none` is the error text for a trace without requests.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        cache: IdealCache | None = None,
        if_none: str | None = None,
    ) -> None:
        self._requests = requests
        self._cache = cache
        self._if_none = if_none
        self._hit_tokens = 0.0
        self.requests = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self.last_s = 0.0

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in self._requests:
            self.requests += 1
            self.input_tokens += request.input_tokens
            self.output_tokens += request.output_tokens
            self.last_s = request.arrival_s
            if self._cache is not None:
                self._hit_tokens += self._cache.look_up(request).hit_tokens
            yield request
        if self._if_none is not None and not self.requests:
            raise InputError(self._if_none)

    def as_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "last_arrival_s": self.last_s,
        }
        if self._cache is not None:
            facts["ideal_hit_ratio"] = self._hit_tokens / max(self.input_tokens, 1)
        return facts


def check_output(output: str, *beside: Path, force: bool, as_json: bool) -> None:
    """Raise InputError if a file is already there, or if rows and JSON would mix."""
    if as_json and output == "-":
        raise InputError(
            "--json: standard output has the rows already (-o -); give -o FILE, or leave out --json"
        )
    refuse_existing([output, *beside], force=force)


def write_whole(
    output: str,
    totals: Totals,
    facts: Callable[[], dict[str, Any]],
    answers: tuple[Path, Iterable[bytes]] | None = None,
) -> dict[str, Any]:
    """Write a trace, its answers and its facts, and return the facts with the totals.

    Files appear at the end, after all bytes are on the disk. So a full disk leaves no file behind.
    `facts` and answers are read after the last request.
    """
    from forebay.traces.reading.jsonl import write_rows

    with ExitStack() as files:
        write_rows(files.enter_context(whole_file(output)), totals, output)
        if answers is not None:
            beside = files.enter_context(whole_file(answers[0]))
            beside.writelines(answers[1])
            beside.flush()
        everything = {**totals.as_dict(), **facts()}
        write_meta(output, everything)
    return everything


def report(facts: dict[str, Any], output: str, as_json: bool) -> None:
    """Print the result of `write_whole` as one line or as JSON."""
    skipped = f", {facts['skipped']} bad rows skipped" if facts.get("skipped") else ""
    line = (
        f"{facts['requests']:,} requests, {facts['input_tokens']:,} input and "
        f"{facts['output_tokens']:,} output tokens over {facts['last_arrival_s']:,.1f} s{skipped}"
    )
    print_result(facts, line + to_file(output), as_json)


def to_file(output: str) -> str:
    return f" -> {output}" if output != "-" else ""


def print_result(facts: dict[str, Any], line: str, as_json: bool) -> None:
    """Print `facts` as JSON to standard output, or `line` to standard error."""
    if as_json:
        print_json(facts)
    else:
        talk(line)


def print_description(trace: str, result: Description) -> None:
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    # One table for the arrivals, and one for the lengths.
    rates = Table()
    rates.add_column("arrivals and sharing")
    rates.add_column("", justify="right")
    for name, value in (
        ("duration, s", number(result.duration_s, 1)),
        ("mean rate, requests/s", number(result.rate_per_s)),
        ("peak of 1 s, requests/s", number(result.peak_rate_1s)),
        ("peak of 60 s, requests/s", number(result.peak_rate_60s)),
        ("inter-arrival CV (Poisson 1)", number(result.interarrival_cv)),
        ("dispersion of 60 s counts (Poisson 1)", number(result.dispersion_60s)),
        ("ideal prefix hit ratio, of tokens", number(result.ideal_hit_ratio, 3)),
        ("requests reusing more than the root", f"{result.reuse_share:.1%}"),
        ("sessions", f"{result.sessions:,}"),
        ("documents", f"{result.documents:,}"),
    ):
        rates.add_row(name, value)
    lengths = Table()
    lengths.add_column("tokens")
    for name in ("mean", "p50", "p90", "p99", "max"):
        lengths.add_column(name, justify="right")
    for name, summary in (("input", result.input_tokens), ("output", result.output_tokens)):
        quantiles = (summary.p50, summary.p90, summary.p99, summary.max)
        lengths.add_row(name, f"{summary.mean:,.0f}", *(f"{value:,}" for value in quantiles))
    # Print the file name without markup, because it may have brackets.
    console = Console()
    console.print(f"{escaped(trace)}: {result.requests:,} requests", markup=False, soft_wrap=True)
    console.print(rates)
    console.print(lengths)
    if result.steady is False:
        console.print(_not_steady(result), markup=False, soft_wrap=True)


def _not_steady(result: Description) -> str:
    """Return a line with the spans of lowest and highest rate."""
    parts = (
        f"{span.rate_per_s:,.3g}/s from {span.from_s:,.0f} s to {span.to_s:,.0f} s"
        for span in (result.slowest_tenth, result.fastest_tenth)
        if span is not None
    )
    return f"the rate is not steady: {', '.join(parts)}; traces edit --slice keeps a span"
