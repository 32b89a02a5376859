"""Draw the plots of a report: latencies by percentile, TTFT over time, and the load over time.

All buckets and runs of a page share the axis of a latency, and the axis of time.

Each function returns an inline SVG. Colours come from the page's `.run0` to `.run9`, so that one
drawing serves light and dark mode. The first six runs also have their own shapes of mark.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from forebay.analysis.charts import svg
from forebay.analysis.compare.figures import RunFigures
from forebay.analysis.report.load_rows import SERVER, LoadRow, end_s, load_rows
from forebay.analysis.statistics.quantiles import Floats, finite, order_statistic, tail_curve
from forebay.analysis.statistics.units import duration

SMALLEST_S = 1e-4  # lower end of the log axis; no answer over a network is faster
PERCENT_TICKS = ((1, "0%"), (2, "50%"), (10, "90%"), (100, "99%"), (1000, "99.9%"),
                 (10_000, "99.99%"), (100_000, "99.999%"))  # fmt: skip
MARKED = ((0.5, "p50"), (0.9, "p90"), (0.95, "p95"), (0.99, "p99"), (0.999, "p99.9"))
LETTER = 10.0  # width of a letter of a tick's label on a phone, with its part of the gap
STRIP = 11.0  # height of the strip with the unanswered requests of one run
ROW, SERVER_ROW, CAPTION = 44.0, 24.0, 18.0  # heights of the rows of the load


@dataclass(frozen=True, slots=True)
class _Frame:
    x: svg.Scale
    y: svg.Scale
    bottom: float
    drawn: str


@dataclass(frozen=True, slots=True)
class Quantity:
    """A latency that is drawn: its name, its column in a run, and the column's unit in seconds.

    A request without an answer counts as infinitely late if `infinite`.
    """

    name: str
    column: str
    unit_s: float = 1.0
    infinite: bool = False

    def samples(self, side: RunFigures, bucket: str) -> Floats:
        """The values of the answered requests of a bucket in seconds, ascending."""
        return np.sort(self._values(side, bucket))

    def axis(self, runs: Sequence[RunFigures]) -> tuple[float, float]:
        """The ends of the axis for all buckets of the runs, so that plots can be compared."""
        of_runs = (self._values(side, None) for side in runs)
        ends = [end for values in of_runs if len(values) for end in (values.min(), values.max())]
        return svg.log_domain([max(float(end), SMALLEST_S) for end in ends])

    def _values(self, side: RunFigures, bucket: str | None) -> Floats:
        return finite(side.run.numbers[self.column][side.of[bucket].ok]) * self.unit_s


TTFT = Quantity("time to first token", "ttft_response_s", infinite=True)
OTHERS = (
    Quantity("end-to-end latency", "e2e_response_s", infinite=True),
    Quantity("time per output token", "tpot_s"),
    Quantity("longest stall", "stall_s"),
    Quantity("queue of the proxy", "queue_ms", 1e-3),
)


def percentile_plot(
    runs: Sequence[RunFigures], bucket: str, min_beyond: int, quantity: Quantity = TTFT
) -> Markup:
    """Draw a latency of `bucket` by percentile on HDR's scale: x = 1 / (1 - percentile), log axes.

    The curve is thin where fewer than `min_beyond` samples are beyond. A dotted curve adds a run's
    unanswered requests as infinitely late samples.
    """
    samples = [quantity.samples(run, bucket) for run in runs]
    lost = [
        run.of[bucket].intended - len(of) if quantity.infinite else 0
        for run, of in zip(runs, samples, strict=True)
    ]
    longest_s = max((float(of[-1]) for of in samples if len(of)), default=-math.inf)
    if longest_s < 0.0 or (longest_s <= SMALLEST_S and not quantity.infinite):
        return Markup()  # nothing was answered, or no request waited for long enough to draw it
    # The x axis ends at the run with most requests, lost ones included.
    most = max(len(of) + gone for of, gone in zip(samples, lost, strict=True))
    frame = _percentile_frame(max(20.0, float(most)), quantity.axis(runs))
    drawn, curves = [frame.drawn], []
    for number, (run, of, gone) in enumerate(zip(runs, samples, lost, strict=True)):
        if not len(of):
            continue
        # The dotted curve leaves the plot at the share of unanswered requests.
        if gone:
            points = _pixels(frame, *tail_curve(of, gone))
            leaves = frame.x((len(of) + gone) / gone)
            path = f"{svg.steps_path(points)}H{leaves:.1f}V{frame.y.end:.1f}"
            drawn.append(svg.element("path", d=path, class_=f"curve lost run{number}"))
        places, values = tail_curve(of)
        # Beyond this place fewer than `min_beyond` samples decide, so the curve is thin.
        sure = places <= max(1.0, len(of) / max(1, min_beyond))
        points = _pixels(frame, places, values)
        strong = _pixels(frame, places[sure], values[sure])
        drawn.append(
            svg.element("path", d=svg.steps_path(points), class_=f"curve thin run{number}")
        )
        drawn.append(svg.element("path", d=svg.steps_path(strong), class_=f"curve run{number}"))
        drawn += _marks(frame, number, run.name, of, min_beyond)
        curves.append(_readout(frame, run.name, number, places, values))
    name = quantity.name[0].upper() + quantity.name[1:]
    label = f"{name} by percentile, {bucket} requests: " + "; ".join(
        f"{run.name} {_spoken(of)}" for run, of in zip(runs, samples, strict=True)
    )
    ends = {"left": frame.x.start, "right": frame.x.end, "most": frame.x.high}
    data = {"curves": json.dumps(curves), **ends}
    return _svg("".join(drawn), svg.HEIGHT, label, "percentile", data)


def timeline_plot(
    runs: Sequence[RunFigures], bucket: str, only: Sequence[int] | None = None
) -> Markup:
    """Draw TTFT of every answered request of `bucket` at the time it was due.

    Strips below the axis, one per run, mark unanswered requests. `only` are the numbers of the runs
    to draw, on the axes of all runs.
    """
    numbers = range(len(runs)) if only is None else only
    columns = {number: _over_time(runs[number], bucket) for number in numbers}
    if not any(len(times) for due, _, lost in columns.values() for times in (due, lost)):
        return Markup()
    strips = [number for number, (_, _, lost) in columns.items() if len(lost)]
    answered = any(len(due) for due, _, _ in columns.values())
    frame = _time_frame(end_s(runs), TTFT.axis(runs) if answered else None, len(strips))
    drawn = [frame.drawn]
    for number, (due_s, ttft_s, _) in columns.items():
        dots = svg.dots_path(frame.x.of_all(due_s), frame.y.of_all(np.maximum(ttft_s, SMALLEST_S)))
        drawn.append(svg.element("path", d=dots, class_=f"dots run{number}"))
    for place, number in enumerate(strips):
        drawn.append(_strip(frame, place, number, runs[number].name, columns[number][2]))
    label = f"Time to first token of {bucket} requests over the run: " + "; ".join(
        f"{runs[number].name} {len(ttft):,} answered, {len(lost):,} rejected or failed"
        for number, (_, ttft, lost) in columns.items()
    )
    height = frame.bottom + len(strips) * STRIP + svg.BOTTOM
    return _svg("".join(drawn), height, label, "timeline", {})


def _strip(frame: _Frame, place: int, number: int, name: str, due_s: Floats) -> str:
    """The strip at `place` below the axis, with a stroke for each unanswered request."""
    top = frame.bottom + 4 + place * STRIP
    strokes = np.unique(np.rint(frame.x.of_all(due_s))).astype(int).tolist()
    path = "".join(f"M{x} {top:.1f}v{STRIP - 3:.1f}" for x in strokes)
    title = svg.element("title", escape(f"{name}: rejected or failed"))
    return svg.element("path", title, d=path, class_=f"ticks run{number}")


def load_plots(runs: Sequence[RunFigures]) -> list[tuple[str, Markup]]:
    """Draw for each run its rate, requests in flight, rejections and the load of each server.

    A plot stands behind the name of its run. All its rows have one axis of time, and each row has
    the same scale in all runs. Empty for runs that do not know the times of single requests.
    """
    edges, of_runs = load_rows(runs)
    highs: dict[str, float] = {}
    for row in (row for rows in of_runs for row in rows):
        highs[row.kind] = max(highs.get(row.kind, 0.0), float(row.values.max()))
    drawn = (_load_plot(number, rows, edges, highs) for number, rows in enumerate(of_runs))
    return list(zip((side.name for side in runs), drawn, strict=False))


def _load_plot(
    number: int, rows: Sequence[LoadRow], edges: Floats, highs: Mapping[str, float]
) -> Markup:
    """Draw the rows of one run, one below the other."""
    x = svg.Scale(0.0, float(edges[-1]), svg.LEFT, svg.WIDTH - svg.RIGHT)
    top, drawn = svg.TOP, []
    places = x.of_all(edges).tolist()
    for row in rows:
        bottom = top + CAPTION + (SERVER_ROW if row.kind == SERVER else ROW)
        high = svg.linear_ticks(highs[row.kind])[-1]
        y = svg.Scale(0.0, high, bottom, top + CAPTION)
        steps = y.of_all(row.values).tolist()
        path = "".join(f"V{up:.1f}H{at:.1f}" for up, at in zip(steps, places[1:], strict=True))
        outline = f"M{places[0]:.1f} {bottom:.1f}{path}V{bottom:.1f}z"
        drawn.append(svg.y_axis(x, y, lambda tick: f"{tick:g}", (0.0, high)))
        drawn.append(svg.text(x.start, top + 12, row.name, "axis", "start"))
        drawn.append(svg.element("path", d=outline, class_=f"area run{number}"))
        top = bottom + 4
    drawn += _time_ticks(x, top, "time")
    label = "Load over the run: " + ", ".join(
        f"{row.name} at most {float(row.values.max()):.3g}" for row in rows
    )
    return _svg("".join(drawn), top + svg.BOTTOM, label, "load", {})


def legend_mark(number: int) -> Markup:
    """The mark of a run, for a legend."""
    drawn = svg.mark(number, 7, 7, f"mark run{number}", "")
    return Markup(svg.element("svg", drawn, viewBox="0 0 14 14", class_="key", aria_hidden="true"))


def _over_time(side: RunFigures, bucket: str) -> tuple[Floats, Floats, Floats]:
    """Due times and TTFT of answered requests, and due times of unanswered ones."""
    figures, numbers = side.of[bucket], side.run.numbers
    due, ttft = numbers["intended_s"], numbers["ttft_response_s"]
    drawn = figures.ok & np.isfinite(due) & np.isfinite(ttft)
    return due[drawn], ttft[drawn], finite(due[figures.rows & ~figures.ok])


def _percentile_frame(most: float, ends: tuple[float, float]) -> _Frame:
    x = svg.Scale(1.0, most, svg.LEFT, svg.WIDTH - svg.RIGHT, log=True)
    frame = _latency_axis(x, ends, svg.HEIGHT - svg.BOTTOM)
    ticks = [(float(place), label) for place, label in PERCENT_TICKS if place <= most]
    grid = (svg.line(x(place), svg.TOP, x(place), frame.bottom, "grid") for place, _ in ticks)
    drawn = [frame.drawn, *grid, svg.x_labels(x, ticks, frame.bottom + 17, LETTER)]
    drawn.append(
        svg.text((x.start + x.end) / 2, svg.HEIGHT - 6, "percentile of answered requests", "axis")
    )
    return _Frame(x, frame.y, frame.bottom, "".join(drawn))


def _time_frame(last_s: float, ends: tuple[float, float] | None, strips: int) -> _Frame:
    """The axes of dots between `ends`, or without them of strips alone."""
    x = svg.Scale(0.0, last_s, svg.LEFT, svg.WIDTH - svg.RIGHT)
    if ends:
        bottom = svg.HEIGHT - svg.BOTTOM
        frame = _latency_axis(x, ends, bottom)
    else:
        bottom = svg.TOP
        frame = _Frame(x, svg.Scale(1.0, 10.0, bottom, svg.TOP), bottom, "")
    drawn = [frame.drawn]
    below = bottom + strips * STRIP
    if strips:
        drawn.append(svg.line(x.start, below + 3, x.end, below + 3, "grid"))
    drawn += _time_ticks(x, below, "due at" + (" (strokes: no answer)" if strips else ""))
    return _Frame(x, frame.y, bottom, "".join(drawn))


def _time_ticks(x: svg.Scale, below: float, title: str) -> list[str]:
    """The labels and the title of an axis of time, in the unit of its length."""
    unit_s, unit = svg.time_unit(x.high)
    drawn = []
    for seconds in svg.time_ticks(x.high):
        at = x(seconds)
        anchor = "end" if at > svg.WIDTH - svg.RIGHT - 10 else "middle"
        drawn.append(svg.text(at, below + 17, f"{seconds / unit_s:g}", "tick", anchor))
    middle = (x.start + x.end) / 2
    return [*drawn, svg.text(middle, below + svg.BOTTOM - 6, f"{title}, {unit}", "axis")]


def _latency_axis(x: svg.Scale, ends: tuple[float, float], bottom: float) -> _Frame:
    low, high = ends
    y = svg.Scale(low, high, bottom, svg.TOP, log=True)
    return _Frame(x, y, bottom, svg.y_axis(x, y, svg.latency_label, svg.log_ticks(low, high)))


def _pixels(frame: _Frame, places: Floats, values: Floats) -> list[tuple[float, float]]:
    """Points in drawing units. Of several in half a unit of x, only the highest is kept."""
    x = frame.x.of_all(places)
    last = _last_of_each(np.rint(x * 2))
    y = frame.y.of_all(np.maximum(values[last], SMALLEST_S))
    return list(zip(x[last].tolist(), y.tolist(), strict=True))


def _last_of_each(ascending: Floats) -> NDArray[np.bool_]:
    """Return a mask of the last of equal values that stand together."""
    return np.append(ascending[1:] != ascending[:-1], np.ones(min(1, len(ascending)), np.bool_))


def _marks(frame: _Frame, number: int, name: str, ordered: Floats, min_beyond: int) -> list[str]:
    drawn = []
    for share, label in MARKED:
        if len(ordered) * (1 - share) < max(1, min_beyond) - 1e-9:
            continue
        value = order_statistic(ordered, share)
        x, y = frame.x(1 / (1 - share)), frame.y(max(value, SMALLEST_S))
        title = f"{name}: {label} {duration(value)}"
        drawn.append(svg.mark(number, x, y, f"mark run{number}", title))
    return drawn


def _readout(
    frame: _Frame, name: str, number: int, places: Floats, values: Floats
) -> dict[str, object]:
    """The steps of a curve, from which the page's script shows values at the pointer."""
    pixels = np.rint(frame.x.of_all(places))
    last = _last_of_each(pixels)
    steps = [
        [int(at), float(f"{value:.4g}")]
        for at, value in zip(pixels[last].tolist(), values[last].tolist(), strict=True)
    ]
    return {"name": name, "run": number, "steps": steps}


def _spoken(ordered: Floats) -> str:
    if not len(ordered):
        return "answered none"
    return f"median {duration(order_statistic(ordered, 0.5))}, longest {duration(ordered[-1])}"


def _svg(drawn: str, height: float, label: str, kind: str, data: dict[str, object]) -> Markup:
    return Markup(
        svg.element(
            "svg",
            drawn,
            viewBox=f"0 0 {svg.WIDTH:g} {height:g}",
            class_=f"plot {kind}",
            role="img",
            aria_label=label,
            **{f"data-{key}": str(value) for key, value in data.items()},
        )
    )
