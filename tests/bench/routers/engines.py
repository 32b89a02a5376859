"""The engines behind the routers: simulated ones, new for every run."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ports import free_ports
from routers.processes import running, wait_healthy

from forebay.replay.engine.vllm_versions import NEWEST


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal engines.

    Attributes:
        fresh: starts them with empty caches and gives their ports. Its argument is a folder for
            logs.
        chunk: their --long-prefill-token-threshold, tokens. 0: off.
    """

    count: int
    model: str
    version: str
    time_scale: float
    fresh: Callable[[Path], AbstractContextManager[list[int]]]
    command: str
    chunk: int = 0


def simulated(count: int, model: str, gpu: str, time_scale: float, chunk: int = 0) -> Fleet:
    """Return `count` equal simulated vLLMs, which are started together for each run."""
    words = ["engine", "--model", model, "--gpu", gpu, "--time-scale", f"{time_scale:g}"]
    words += ["--enable-prompt-tokens-details"]
    if chunk:
        words += ["--long-prefill-token-threshold", str(chunk)]

    @contextmanager
    def fresh(folder: Path) -> Iterator[list[int]]:
        ports = free_ports(count)
        with ExitStack() as stack:
            started = []
            for number, port in enumerate(ports):
                log = folder / f"engine{number}.log"
                command = [sys.executable, "-m", "forebay.proxy", *words, "--port", str(port)]
                started.append((stack.enter_context(running(command, log, os.environ)), port, log))
            for process, port, log in started:
                wait_healthy(process, port, log)
            yield ports

    version = f"simulated vLLM {NEWEST}, {model} on {gpu}"
    return Fleet(
        count, model, version, time_scale, fresh, "forebay " + " ".join(words), chunk
    )  # fmt: skip
