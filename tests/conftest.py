"""The order of test files, and which of them `make quick` runs.

Files that start a real vLLM come first: as the last ones they would keep one worker busy. The two
servers of fleet/test_fleet_vllm.py run beside vLLM's scheduler and a long simulation. Beside a
third server their speeds differ so much that a document may move.
"""

import asyncio
import inspect
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from forebay.replay.clock.virtual_loop import run

# A busy machine may take seconds for what a quiet one does in milliseconds.
settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")

FIRST = ("engine/test_scheduler_vllm.py", "fleet/test_fleet_vllm.py", "sim/test_fleet_shared.py")
SIMULATIONS = {"behaviour", "bench", "sim"}
NOT_QUICK = re.compile(
    "proxy_stage|replay_server|fleet_stage|vllm_server|start_engine|cache_spy|overload"
    "|import subprocess|import socket|http.server"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out servers, processes and long simulations"
    )
    parser.addoption(
        "--write-golden", action="store_true", help="write the golden traces of formats again"
    )
    parser.addoption(
        "--write", action="store_true", help="write figures that fell into tests/weight.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_time: a coroutine test whose clock is the real one")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: in virtual time, unless it is marked `real_time`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if pyfuncitem.get_closest_marker("real_time"):
        asyncio.run(test)
    else:
        run(test)
    return True


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --quick, leave out files that name a server, a process or a long simulation."""
    if not config.getoption("quick") or not collection_path.match("test_*.py"):
        return None
    rooms = collection_path.relative_to(Path(__file__).parent).parts
    in_simulation = not SIMULATIONS.isdisjoint(rooms)
    return in_simulation or bool(NOT_QUICK.search(collection_path.read_text("utf-8"))) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    for rank, name in enumerate(FIRST):
        if item.path.match(name):
            return rank
    return len(FIRST) + ("vllm" not in item.path.name)
