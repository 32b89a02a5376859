"""Walks: the order in which a task enters the modules of the product, seen by a profiler."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from fakes.made_runs import write_pair
from stages.proxy_stage import on_stage
from stages.replay_server import rows, run_one

from forebay.analysis.report.report import build_report
from forebay.analysis.runs.load import load_runs
from forebay.replay.clock.virtual_loop import run

PREFIX = "forebay."
LOOP = "forebay.replay.clock.virtual_loop"  # of the tests: in service it is a library
CORE = "forebay.proxy.core."
Arrow = tuple[str, str]  # from the module that calls to the module that is called


class Walk:
    """The arrows of a task: each pair of modules of which the first calls the second, once."""

    def __init__(self) -> None:
        self.arrows: dict[Arrow, None] = {}  # in the order of first calls

    def record(self, task: Callable[[], object]) -> None:
        sys.setprofile(self._note)
        try:
            task()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        callee = _module(frame)
        if event != "call" or not _counts(callee):
            return
        # The event loop and libraries stand between some modules.
        caller = frame.f_back
        while caller is not None and not _counts(_module(caller)):
            caller = caller.f_back
        if caller is not None and _module(caller) != callee:
            self.arrows[_module(caller), callee] = None

    def returns(self, prefix: str = PREFIX) -> int:
        """Return the number of arrows into a module that was entered before."""
        callees = [callee for _, callee in self.arrows if callee.startswith(prefix)]
        return len(callees) - len(set(callees))


def _counts(module: str) -> bool:
    return module.startswith(PREFIX) and module != LOOP


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def chat_walk(*, stream: bool) -> Walk:
    """Return the walk of a chat through the proxy, from its socket to its last byte."""
    walk = Walk()
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": stream}

    async def main() -> None:
        async with on_stage(None) as (on, _):
            async with on.post(chat, "/v1/chat/completions") as warm_up:
                await warm_up.read()
            sys.setprofile(walk._note)
            try:
                async with on.post(chat, "/v1/chat/completions") as response:
                    await response.read()
            finally:
                sys.setprofile(None)

    run(main())
    return walk


def load_test_walk() -> Walk:
    """Return the walk of a load test of five requests."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        run_one(Path(folder, "warm-up"), rows(5))
        walk.record(lambda: run_one(Path(folder, "run"), rows(5)))
    return walk


def report_walk() -> Walk:
    """Return the walk of the report of two runs."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        runs = load_runs(write_pair(Path(folder)))
        build_report(runs)
        walk.record(lambda: build_report(runs))
    return walk


def returns_by_walk() -> dict[str, int]:
    """Return the returns of each walk, by its name."""
    chat = chat_walk(stream=False)
    return {
        "returns of a chat": chat.returns(),
        "returns of a chat in the core": chat.returns(CORE),
        "returns of a streamed chat": chat_walk(stream=True).returns(),
        "returns of a load test": load_test_walk().returns(),
        "returns of a report": report_walk().returns(),
    }
