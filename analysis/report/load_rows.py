"""Compute the load over time: rate, requests in flight, rejections, and the load of each server.

With `replay --metrics` also the use and the power of GPUs, and the use of KV caches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from forebay.analysis.compare.figures import RunFigures
from forebay.analysis.statistics.quantiles import Floats, finite
from forebay.replay.results.folder import METRICS
from forebay.replay.results.server_metrics import GAUGES, ServerGauges, keep_sample
from forebay.traces.ground.errors import InputError

BINS = 100  # parts of the time
PER_BIN = 8  # fewest requests for each of them, or a rate would be noise
MOST_SERVERS = 16  # the busiest have a row each
SERVER = "server"


@dataclass(frozen=True, slots=True)
class LoadRow:
    """A figure of the load in each part of the time. Rows of one `kind` share a scale."""

    kind: str
    name: str
    values: Floats


def load_rows(runs: Sequence[RunFigures]) -> tuple[Floats, list[list[LoadRow]]]:
    """Return the edges of the parts of the time in seconds, and the rows of each run.

    No rows for runs that do not know the times of single requests.
    """
    if not all(side.run.requests and side.run.info.get("joint", True) for side in runs):
        return np.zeros(0), []
    bins = min(BINS, max(side.run.requests for side in runs) // PER_BIN + 1)
    edges = np.linspace(0.0, end_s(runs), bins + 1)
    return edges, [_rows(side, edges) for side in runs]


def _rows(side: RunFigures, edges: Floats) -> list[LoadRow]:
    """Compute the rows of a run: per second, or the mean number at once, between the edges."""
    numbers, lost = side.run.numbers, ~side.of[None].ok
    # A request is in flight from its sending to its answer. Before it came to a server, it waited
    # in the proxy. A failed request may have no end.
    sent, waited = numbers["sent_s"], np.nan_to_num(numbers["queue_ms"] / 1e3)
    ends = numbers["intended_s"] + numbers["e2e_response_s"]
    ends = np.where(lost, sent + np.nan_to_num(numbers["reject_latency_s"]), ends)
    busiest = sorted(side.backends, key=lambda row: -row.prompt_tokens)[:MOST_SERVERS]
    left_out = len(side.backends) - len(busiest)
    rows = [
        LoadRow("rate", "requests due per second", _rate(numbers["intended_s"], edges)),
        LoadRow("flight", "requests in flight", _at_once(sent, ends, edges)),
        LoadRow("lost", "rejected or failed per second", _rate(numbers["intended_s"][lost], edges)),
    ]
    for name in sorted(row.name for row in busiest):
        mine = side.run.words["backend"] == name
        label = f"in flight at {name}"
        if left_out and len(rows) == 3:
            label += f" (the {len(busiest)} busiest of {len(side.backends)} servers)"
        rows.append(LoadRow(SERVER, label, _at_once((sent + waited)[mine], ends[mine], edges)))
    return [*rows, *_gauge_rows(side.run.path, edges)]


def _gauge_rows(folder: Path, edges: Floats) -> Iterator[LoadRow]:
    gauges = read_gauges(folder)
    for name, gauge in GAUGES.items():
        if (means := gauges.means(name, edges)) is not None:
            unit, scale = ("%", 100.0) if gauge.unit == "share" else ("kW", 1e-3)
            yield LoadRow(name, f"{gauge.label}, {unit}", means * scale)


def read_gauges(folder: Path) -> ServerGauges:
    """Read the samples of a run, none without `--metrics` (InputError: a damaged file)."""
    gauges, file = ServerGauges(), folder / METRICS
    if not file.is_file():
        return gauges
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [series for gauge in GAUGES.values() for series in gauge.series]
    try:
        table = pq.read_table(file, filters=[("name", "in", names)])
        of_series, numbers = (
            [table.column(name).to_pylist() for name in columns]
            for columns in (("source", "name", "labels"), ("s", "value"))
        )
    except (pa.ArrowException, OSError, KeyError) as error:
        line = str(error).partition("\n")[0]
        raise InputError(f"{file}: damaged parquet ({line}); repeat the run") from error
    series = list(zip(*of_series, strict=True))
    samples = {
        (source, name, labels): gauges.samples(source, name, orjson.loads(labels))
        for source, name, labels in set(series)
    }
    for each, at_s, value in zip(series, *numbers, strict=True):
        if (to := samples[each]) is not None:
            keep_sample(to, at_s, value)
    return gauges


def _rate(moments: Floats, edges: Floats) -> Floats:
    counts, _ = np.histogram(finite(moments), edges)
    rates: Floats = counts / np.diff(edges)
    return rates


def _at_once(starts: Floats, ends: Floats, edges: Floats) -> Floats:
    """Return the mean number of requests between each two edges that have begun and not ended."""
    both = np.isfinite(starts) & np.isfinite(ends)
    begun, ended = (_seconds_since(moments[both], edges) for moments in (starts, ends))
    means: Floats = np.maximum(0.0, np.diff(begun - ended) / np.diff(edges))
    return means


def _seconds_since(moments: Floats, edges: Floats) -> Floats:
    """Return for each edge the sum of the seconds since all moments before it."""
    ordered = np.sort(moments)
    before = np.searchsorted(ordered, edges)
    sums: Floats = before * edges - np.concatenate(([0.0], np.cumsum(ordered)))[before]
    return sums


def end_s(runs: Sequence[RunFigures]) -> float:
    """The time at which the last request of the runs was due, or the last answer ended."""
    columns = (side.run.numbers for side in runs)
    times = [
        moments
        for of in columns
        for moments in (of["intended_s"], of["intended_s"] + of["e2e_response_s"])
    ]
    return max((float(of.max()) for of in map(finite, times) if len(of)), default=0.0) or 1e-3
