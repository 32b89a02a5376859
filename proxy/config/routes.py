"""Find a routing policy by its name: one of the proxy, of a plug-in, or of a file.

A plug-in is an installed package with an entry point in the group `forebay.routing`; FILE.py:NAME
is a function in a file. Both are pure functions `choose(request, engines, now)` that return one of
`engines` (docs/how-to/write-a-routing-policy.md). The proxy and the simulator run the same one.
"""

from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from typing import Any

from forebay.proxy.core.model import Request
from forebay.proxy.core.policy.routing import ROUTES, Affinity, Option, Route
from forebay.traces.ground.command_line.plugins import load_plugin, plugin_names
from forebay.traces.ground.errors import InputError

GROUP = "forebay.routing"
Choose = Callable[[Request, Sequence[Option], float], Option]


def route_names() -> list[str]:
    """List the policies of the proxy, then the policies of plug-ins."""
    return [*ROUTES, *plugin_names(GROUP)]


def find_route(name: str) -> Route | None:
    """Return the policy of that name, or None.

    Raises InputError if it cannot be loaded.
    """
    if name in ROUTES:
        return ROUTES[name]
    file, separator, function = name.rpartition(".py:")
    choose = _from_file(Path(f"{file}.py"), function) if separator else load_plugin(GROUP, name)
    if choose is None:
        return None
    if not callable(choose):
        raise InputError(f"{name}: it is no function choose(request, engines, now)")
    return CheckedRoute(name, choose)


class CheckedRoute:
    """A routing policy that may fail: InputError says how, and in which line.

    Args:
        name: as the configuration gives it.
    """

    def __init__(self, name: str, choose: Choose) -> None:
        self.name = name
        self.choose = choose

    def __call__(
        self, request: Request, options: Sequence[Option], affinity: Affinity, now: float
    ) -> Option:
        try:
            # A tuple: the list belongs to the caller.
            chosen = self.choose(request, tuple(options), now)
        except BaseException as error:  # a plug-in that calls exit() must not end the proxy
            at = extract_tb(error.__traceback__)[-1]
            raise InputError(
                f"{self.name}: {type(error).__name__}: {error} ({Path(at.filename).name}, "
                f"line {at.lineno}), for request {request.id}"
            ) from error
        if not any(chosen is option for option in options):
            raise InputError(
                f"{self.name}: returned {type(chosen).__name__}, not one of `engines`, for "
                f"request {request.id}"
            )
        return chosen


def _from_file(path: Path, function: str) -> Any:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    spec = spec_from_file_location(f"forebay_routing_{path.stem}", path)
    assert spec is not None  # its name ends with .py
    assert spec.loader is not None
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{path}: {type(error).__name__}: {error}") from error
    if not hasattr(module, function):
        raise InputError(f"{path}: it defines no {function}")
    return getattr(module, function)
