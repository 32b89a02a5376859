"""Find the parts that installed packages add to Forebay: entry points, by group and name."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from forebay.traces.ground.errors import InputError

LAB = {
    "largest_gain": "forebay.analysis.tune.cli:largest_gain",
    "sim_target": "forebay.analysis.simulation.sim_target:SimulatedTarget",
    "simulate_command": "forebay.analysis.simulation.simulate_command:simulate_command",
}
"""Entry points of the simulator, which load tests and `doctor` use and never import."""


def from_lab(name: str) -> Any:
    """Load an object of `LAB`."""
    return EntryPoint(name, LAB[name], "forebay.lab").load()


def plugin_names(group: str) -> list[str]:
    """List the names that installed packages define in the group."""
    return sorted({point.name for point in entry_points(group=group)})


def load_plugin(group: str, name: str) -> Any | None:
    """Load the object of that name, or return None if no installed package defines it.

    Raises:
        InputError: it cannot be loaded, or two packages define it.
    """
    points = list(entry_points(group=group, name=name))
    if not points:
        return None
    if len({point.value for point in points}) > 1:
        homes = " and ".join(sorted({_home(point) for point in points}))
        raise InputError(f"{name}: {homes} both define it; uninstall one of them")
    try:
        return points[0].load()
    except Exception as error:
        raise InputError(
            f"{name}: {_home(points[0])} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _home(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
