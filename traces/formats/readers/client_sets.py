"""Make requests from ServeGen's description of clients: rates and lengths, no prompts.

Each client has two files. `chunk-N-trace.csv` has rows of 600 s: time, rate, CV, distribution of
gaps with two parameters. `chunk-N-dataset.json` has distributions of lengths for every 21,600 s.
The published parameters are fits whose mean is not 1/rate, so gaps are scaled to the rate. Source:
alibaba/ServeGen, Xiang et al., arXiv:2505.09999.
"""

import ast
import csv
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate
from math import gamma, isfinite
from pathlib import Path
from random import Random

import orjson

from forebay.traces.formats.table import ReadOptions, TraceFormat
from forebay.traces.ground.errors import InputError, reading
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.rows import SHAPE_ERRORS

WINDOW_S = 600.0
_ROW = re.compile(r"[0-9.]+,[0-9.eE+-]+,[0-9.eE+-]+,[A-Za-z]*,[0-9.eE+-]*,[0-9.eE+-]*")


@dataclass(frozen=True, slots=True)
class _Window:
    """Arrivals of one client from `start_s` on, for 600 s."""

    start_s: float
    rate_per_s: float
    kind: str
    shape: float

    def gap_s(self, dice: Random) -> float:
        """Draw a gap of mean 1/rate and of the published shape."""
        if self.kind == "Weibull":
            mean = gamma(1 + 1 / self.shape)
            return dice.weibullvariate(1.0, self.shape) / mean / self.rate_per_s
        if self.kind == "Gamma":
            return dice.gammavariate(self.shape, 1.0) / self.shape / self.rate_per_s
        return dice.expovariate(self.rate_per_s)


@dataclass(frozen=True, slots=True)
class _Lengths:
    """A distribution of lengths: values, and sums of their weights."""

    values: list[int]
    sums: list[float]

    def draw(self, dice: Random) -> int:
        at = bisect_right(self.sums, dice.random() * self.sums[-1])
        return self.values[min(at, len(self.values) - 1)]


def _read(path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
    files = sorted(path.rglob("chunk-*-trace.csv")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: holds no chunk-N-trace.csv; give a folder of ServeGen clients")
    clients = [(file, list(_windows(file))) for file in files]
    active = [
        window.start_s for _, windows in clients for window in windows if window.rate_per_s > 0
    ]
    if not active:
        raise InputError(f"{path}: no client sends a request; give another folder")
    start_s = min(active) if options.start_s is None else options.start_s
    streams = [_client(file, windows, start_s, options) for file, windows in clients]
    for number, request in enumerate(merge(*streams, key=lambda arrival: arrival[0])):
        at_s, client, input_tokens, output_tokens = request
        yield TraceRequest(
            id=f"servegen-{number}",
            arrival_s=round(at_s - start_s, 6),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            tenant=client,
        )


def _windows(file: Path) -> Iterator[_Window]:
    try:
        with reading(file):
            rows = list(csv.reader(file.read_text("utf-8", "replace").splitlines()))
    except csv.Error as error:
        raise InputError(f"{file}: not CSV ({error}); fetch it again") from error
    for number, row in enumerate(rows, 1):
        try:
            time_s, rate = float(row[0]), float(row[1])
            if not (isfinite(rate) and rate >= 0):
                raise ValueError(row[1])
            shape = float(row[4] or 0) if row[3] else 1.0
            if rate and row[3] and not shape > 0:
                raise ValueError(row[4])
        except (ValueError, IndexError) as error:
            why = f"not time, rate, cv, distribution and two parameters ({str(error)[:80]})"
            raise InputError(f"{file}:{number}: {why}") from error
        yield _Window(time_s, rate, row[3], shape)


def _client(
    file: Path, windows: list[_Window], start_s: float, options: ReadOptions
) -> Iterator[tuple[float, str, int, int]]:
    name = file.name.removesuffix("-trace.csv")
    dice = Random(f"{options.seed}:{name}")
    lengths = _datasets(file.with_name(f"{name}-dataset.json"), options)
    end_s = start_s + options.duration_s
    for window in windows:
        if not window.rate_per_s or not start_s - WINDOW_S < window.start_s < end_s:
            continue
        at_s = window.start_s + window.gap_s(dice)
        while at_s < window.start_s + WINDOW_S:
            if start_s <= at_s < end_s:
                inputs, outputs = _at(lengths, at_s)
                yield at_s, name, max(1, inputs.draw(dice)), outputs.draw(dice)
            at_s += window.gap_s(dice)


def _at(lengths: list[tuple[float, _Lengths, _Lengths]], at_s: float) -> tuple[_Lengths, _Lengths]:
    before = [entry for entry in lengths if entry[0] <= at_s]
    _, inputs, outputs = before[-1] if before else lengths[0]
    return inputs, outputs


def _datasets(file: Path, options: ReadOptions) -> list[tuple[float, _Lengths, _Lengths]]:
    if not file.exists():
        if options.input_tokens is None or options.output_tokens is None:
            raise InputError(
                f"{file}: no such file, so lengths are not known; give --input-tokens and "
                "--output-tokens"
            )
        fixed = _Lengths([options.input_tokens], [1.0]), _Lengths([options.output_tokens], [1.0])
        return [(0.0, *fixed)]
    distributions = []
    try:
        for time_s, values in orjson.loads(file.read_bytes()).items():
            inputs = ast.literal_eval(values["input_tokens"])
            outputs = ast.literal_eval(values["output_tokens"])
            if inputs and outputs:
                distributions.append((float(time_s), _lengths(inputs), _lengths(outputs)))
    except (OSError, SyntaxError, MemoryError, *SHAPE_ERRORS) as error:
        why = str(error)[:80]
        raise InputError(f"{file}: not a ServeGen dataset ({why}); fetch it again") from error
    if not distributions:
        raise InputError(f"{file}: no distribution of lengths; leave this client out")
    return sorted(distributions, key=lambda entry: entry[0])


def _lengths(weights: dict[int, float]) -> _Lengths:
    return _Lengths([int(length) for length in weights], list(accumulate(weights.values())))


servegen = TraceFormat(
    name="servegen",
    what="ServeGen client sets: a folder of `chunk-N-trace.csv` and `chunk-N-dataset.json`",
    keeps="the client as tenant; made with `--seed`, `--start` and `--duration`",
    recognise=lambda head: _ROW.fullmatch(head.line) is not None,
    folder=_read,
)
