"""Goodput of an earlier commit's policy and of today's, on recorded traffic at twice the capacity.

Today's simulator plays both. The earlier source becomes a package of its own, `forebay_earlier`,
and an adapter translates what its policy is told and what it answers.

    python tests/bench/earlier.py 63938a5               default flags, three windows of each trace
    python tests/bench/earlier.py 63938a5 --chunk 2048  with --long-prefill-token-threshold

Goodput is that of `guard.py`. The commit must be in this checkout. Recorded traffic needs --data
(see CONTRIBUTING.md): without that folder only the traffic of the guard is played. This needs the
plain Python source, not the compiled one.
"""

import argparse
import importlib
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from arena_policies import FOREBAY, new_policy
from arena_workloads import ENGINE, LOADS, Load, Rows, at_load
from guard import figures
from guard_workloads import rows_at_capacity
from paths import ROOT, SHARED

from forebay.proxy.core.model import Action, Reject, Request, Send
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet, Policy

PARTS = ("analysis", "proxy", "replay", "traces")
PACKAGE = "forebay_earlier"
LOAD = 2.0
GUARDS = ("popular documents", "rag", "conversation")  # besides recorded traffic


class Earlier:
    """The earlier policy, as the simulated fleet calls a policy."""

    def __init__(self, shaper: Any, request_of: Callable[..., Any]) -> None:
        self._shaper = shaper
        self._request_of = request_of
        self._requests: dict[str, Request] = {}

    @property
    def wants_usage(self) -> bool:
        return bool(self._shaper.wants_usage)

    def arrive(self, request: Request, now: float) -> list[Action]:
        self._requests[request.id] = request
        told = self._request_of(
            request.id, request.prompt_tokens, request.output_tokens, request.blocks,
            request.block_tokens, request.timeout_s, request.streams, request.tenant,
            request.service_class,
        )  # fmt: skip
        return self._translated(self._shaper.arrive(told, now))

    def backend_up(self, name: str, now: float, kv_tokens: float | None = None) -> list[Action]:
        return self._translated(self._shaper.backend_up(name, now, kv_tokens))

    def first_token(self, request_id: str, now: float) -> list[Action]:
        return self._translated(self._shaper.first_token(request_id, now))

    def finish(self, request_id: str, now: float) -> list[Action]:
        return self._translated(self._shaper.finish(request_id, now))

    def used(self, request_id: str, output_tokens: int, now: float, cached: int | None) -> None:
        self._shaper.used(request_id, output_tokens, now, cached)

    def wake(self, now: float) -> list[Action]:
        return self._translated(self._shaper.wake(now))

    def wake_at(self) -> float:
        return float(self._shaper.wake_at())

    def _translated(self, actions: Sequence[Any]) -> list[Action]:
        translated: list[Action] = []
        for theirs in actions:
            request = self._requests[theirs.request.id]
            times = theirs.bucket, theirs.queued_s
            if hasattr(theirs, "backend"):
                predicted = theirs.predicted_ttft_s, theirs.matched_tokens
                translated.append(Send(request, theirs.backend, *times, *predicted))
            else:
                translated.append(Reject(request, theirs.reason, *times, theirs.retry_after_s))
        return translated


@contextmanager
def earlier_source(commit: str) -> Iterator[None]:
    """Make the source of a commit importable as PACKAGE."""
    archive = subprocess.run(
        ["git", "archive", commit, *PARTS], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with TemporaryDirectory() as folder:
        package = Path(folder, PACKAGE)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(package, filter="data")
        for path in package.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            renamed = re.sub(rf"\bforebay\.(?={'|'.join(PARTS)})", f"{PACKAGE}.", text)
            path.write_text(renamed, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)


@contextmanager
def earlier_policy(engine: EngineConfig, names: Sequence[str]) -> Iterator[Policy]:
    scenario = importlib.import_module(f"{PACKAGE}.replay.sim.scenario")
    config = importlib.import_module(f"{PACKAGE}.replay.engine.config").EngineConfig
    model = importlib.import_module(f"{PACKAGE}.proxy.core.model")
    flag = engine.long_prefill_token_threshold
    theirs = scenario.Scenario(engine=config(long_prefill_token_threshold=flag))
    yield Earlier(theirs.new_policy(names), model.Request)  # type: ignore[misc]


def traffic(data: Path, seeds: int) -> Iterator[tuple[str, list[Rows]]]:
    """Yield kinds of traffic, each with its requests at the load, for each seed."""
    for name in GUARDS:
        rows = [rows_at_capacity(name, 2, seed) for seed in range(seeds)]
        yield (
            f"{name} (made)",
            [[replace(row, arrival_s=row.arrival_s / LOAD) for row in trace] for trace in rows],
        )
    if (data / "traces").is_dir():
        for load in (load for load in LOADS if load.data and load.kind != "mixed"):
            yield load.name, [at_load(load.make(seed, data), LOAD) for seed in range(seeds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("--chunk", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=SHARED / "data")
    options = parser.parse_args()
    engine = replace(ENGINE, long_prefill_token_threshold=options.chunk)
    names = ["gpu0", "gpu1"]
    plain = Load("earlier", lambda seed, data: Rows(), 1.0)  # only its configuration counts here
    policies = {
        options.commit: partial(earlier_policy, engine, names),
        "today": partial(new_policy, FOREBAY, plain, engine, names),
    }
    print("| traffic | policy | in time, % | goodput, /s | E2E p50, s |")
    print("| --- | --- | --- | --- | --- |")
    with earlier_source(options.commit):
        for name, listed in traffic(options.data, options.seeds):
            for policy, make in policies.items():
                outcomes, span_s = [], 0.0
                for rows in listed:
                    with make() as chosen:
                        fleet = Fleet(chosen, {gpu: served_engine(engine) for gpu in names})
                        outcomes += fleet.run(rows)
                    span_s += rows[-1].arrival_s
                in_time, goodput, _, _, e2e_s = figures(outcomes, span_s)
                print(f"| {name} | {policy} | {in_time} | {goodput} | {e2e_s} |", flush=True)


if __name__ == "__main__":
    main()
