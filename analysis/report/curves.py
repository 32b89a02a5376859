"""Build the page that compares the load curves of several searches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from markupsafe import Markup

from forebay.analysis.charts.panels import Axis, Panel, count_label, document, line, share_label
from forebay.analysis.report.report import MAX_RUNS, render
from forebay.analysis.runs.load import read_json
from forebay.analysis.runs.run import folder_name
from forebay.analysis.search.search import QUESTION, RESULT
from forebay.analysis.statistics.units import durations, rates, shares
from forebay.traces.ground.errors import InputError

KNOWN = ("rate_per_s", "completed_per_s", "attainment")
TIMES = ("ttft_p50_s", "ttft_p99_s")  # null where too many requests have no answer


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """The result of a search: its name, its sentence, and its points by load, as in its JSON."""

    name: str
    sentence: str
    points: Sequence[dict[str, Any]]


def is_curve(folder: Path) -> bool:
    return (folder / QUESTION).is_file() and (folder / RESULT).is_file()


def curves_page(folders: Sequence[Path], title: str | None) -> str:
    """Return the page (InputError: too many folders, or a damaged result)."""
    if len(folders) > MAX_RUNS:
        raise InputError(f"{len(folders)} searches: a report takes 1 to {MAX_RUNS}")
    curves = [_curve(folder) for folder in folders]
    # Attainment by load, then latency: to the right more is completed, upwards it takes longer.
    offered, completed = (
        Axis(f"requests per second {what}", count_label) for what in ("offered", "completed")
    )
    met = [line(curve.name, curve.points, "rate_per_s", "attainment") for curve in curves]
    panels = [
        Panel(met, offered, Axis("share that met the targets", share_label, log=False)),
        *(
            Panel(
                [line(curve.name, curve.points, "completed_per_s", key) for curve in curves],
                completed,
                Axis(f"time to first token, {key[5:8]}"),
            )
            for key in TIMES
        ),
    ]
    # The page has the sentences, the chart and the figures.
    return render(
        "curves.html",
        title=title or " and ".join(curve.name for curve in curves),
        curves=curves,
        rows=_rows(curves),
        chart=Markup(document(*panels)),  # its texts are escaped where they are drawn
    )


def _curve(folder: Path) -> LoadCurve:
    result = read_json(folder / RESULT)
    targets = read_json(folder / QUESTION).get("target")
    simulated = isinstance(targets, list) and str(targets[:1]).startswith("['sim:")
    name = f"{folder_name(folder)}{' (simulated)' if simulated else ''}"
    points = result.get("curve")
    if not isinstance(points, list) or not all(map(_is_point, points)):
        raise InputError(f"{folder / RESULT}: holds no curve; repeat the search")
    return LoadCurve(name, str(result.get("sentence")), points)


def _is_point(point: object) -> bool:
    if not isinstance(point, dict):
        return False
    numbers = all(type(point.get(key)) in (int, float) for key in KNOWN)
    return numbers and all(type(point.get(key)) in (int, float, NoneType) for key in TIMES)


def _rows(curves: Sequence[LoadCurve]) -> list[tuple[str, ...]]:
    """Return the name and the figures of each load. Each column has one unit."""
    named = [(curve.name, point) for curve in curves for point in curve.points]
    return list(
        zip(
            (name for name, _ in named),
            *(rates([point[key] for _, point in named]) for key in KNOWN[:2]),
            shares([point["attainment"] for _, point in named]),
            *(durations([point[key] for _, point in named]) for key in TIMES),
            strict=True,
        )
    )
