"""Hash every decision of the policy, so that a change of its code can be shown to change none.

    python tests/bench/decisions.py          compare with those in tests/data; exit 1 if any differs
    python tests/bench/decisions.py --write  keep the hashes of today

A hash covers each action of a run: its time, kind, request and all values, to the last bit. The
runs are each workload of `guard_workloads` at two loads on three fleets (whole prompts, chunked
ones, and unequal GPUs), and `scrambled` runs, in which a shaper meets random events: tenants,
classes, quotas, silent requests, retries, cancellations, trials, other proxies, backends and
buckets that come, change and go. Scrambled runs also hash the records that explain the decisions.
"""

import argparse
import hashlib
import heapq
import json
import os
import random
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from guard_workloads import ENGINE, KINDS, rows_at_capacity
from paths import DATA

from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import CLASSES, Action, BackendSpec, Bucket, Request, Send, Tenant
from forebay.proxy.core.policy.routing import Affinity, warm_or_least_work
from forebay.proxy.core.shaper import Shaper
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet
from forebay.replay.sim.scenario import Scenario

KEPT = DATA / "decisions.json"
FLEETS = {
    "whole": (ENGINE,) * 2,
    "flag": (replace(ENGINE, long_prefill_token_threshold=2_048),) * 2,
    "unequal": tuple(replace(ENGINE, gpu=gpu) for gpu in ("h200", "h100", "l40s")),
}
LOADS = ("0.8", "1.5")  # times the capacity of two H200
SCRAMBLED = range(40)


class Digest:
    """The hash of a run's actions in order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.actions = 0

    def add(self, now: float, action: Action) -> None:
        request = action.request
        values: tuple[Any, ...]
        if isinstance(action, Send):
            values = "send", action.backend, action.predicted_ttft_s, action.matched_tokens
        else:
            values = "reject", action.reason, action.retry_after_s, action.hopeless
        self.text(repr((now, request.id, action.bucket, action.queued_s, *values)))
        self.actions += 1

    def text(self, text: str) -> None:
        self._digest.update(text.encode())

    def __str__(self) -> str:
        return f"{self._digest.hexdigest()[:16]} {self.actions}"


def simulated(kind: str, load: str, fleet: str) -> str:
    """The hash of one workload's decisions in virtual time."""
    engines = {f"gpu{at}": served_engine(engine) for at, engine in enumerate(FLEETS[fleet])}
    policy = Scenario(engine=FLEETS[fleet][0]).new_policy(list(engines))
    digest = Digest()
    rows = rows_at_capacity(kind, 2, 0)
    Fleet(policy, engines, digest.add).run(
        replace(row, arrival_s=row.arrival_s / float(load)) for row in rows
    )
    return str(digest)


class Scramble:
    """One shaper and the random events that it meets."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(f"scramble {seed}")
        self.digest = Digest()
        self.explained = Digest()
        self.now = 0.0
        self.events: list[tuple[float, int, str, str]] = []
        self.entered = 0
        self.number = 0
        self.sent: dict[str, Send] = {}
        self.queued: set[str] = set()
        self.documents = [self.blocks(dice.randint(4, 200)) for _ in range(12)]
        self.tenants = [Tenant("a", 3.0), Tenant("b", 1.0, 20_000.0, 60_000.0)]
        self.fair = dice.random() < 0.6
        self.classed = dice.random() < 0.4
        self.streamed = dice.choice([1.0, 0.8])
        self.shared = dice.random() < 0.4
        self.slots = dice.choice([3, 8, 64])
        self.count = dice.choice([2, 3, 12])
        self.rate = dice.choice([1.0, 3.0, 8.0])
        self.kv = dice.choice([inf, 300_000.0])
        self.gpus = 0
        self.shaper = self.new([self.spec() for _ in range(self.count)])
        self.peer = self.new([BackendSpec(name, self.slots) for name in self.shaper.backends])

    def new(self, specs: Iterable[BackendSpec]) -> Shaper:
        return Shaper(
            specs,
            self.buckets(),
            tenants=self.tenants if self.fair else (),
            recorder=DecisionRecorder(100_000),
        )

    def spec(self) -> BackendSpec:
        name, self.gpus = f"gpu{self.gpus}", self.gpus + 1
        chunk = 2_048.0 if self.dice.random() < 0.3 else inf
        return BackendSpec(name, self.slots, self.kv, chunk)

    def buckets(self, most: int = 131_072) -> list[Bucket]:
        long = Bucket("document", most, self.dice.choice([8, 64]), 30.0, 1)
        return [Bucket("chat", 5_000, self.dice.choice([20, 256]), 2.0), long]

    def blocks(self, count: int) -> tuple[int, ...]:
        return tuple(self.dice.getrandbits(62) for _ in range(count))

    def request(self) -> Request:
        dice = self.dice
        self.number += 1
        if dice.random() < 0.5:
            count = dice.randint(1, 8)
            blocks = self.blocks(count)
        else:
            blocks = dice.choice(self.documents)[: dice.choice([3, 20, 200])]
            blocks = (*blocks, *self.blocks(dice.choice([0, 1])))
        return Request(
            f"r{self.number}",
            max(1, 512 * len(blocks) + dice.randint(-200, 400)),
            dice.choice([16, 300, 2_000]),
            blocks,
            512.0,
            dice.choice([inf, inf, 20.0, 3.0]),
            dice.random() < self.streamed,
            dice.choice(["a", "b", "c"]) if self.fair else "",
            dice.choice(CLASSES) if self.classed else "standard",
        )

    def at(self, delay_s: float, kind: str, of: str = "") -> None:
        self.entered += 1
        heapq.heappush(self.events, (self.now + delay_s, self.entered, kind, of))

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            name = action.request.id
            self.digest.add(self.now, action)
            self.queued.discard(name)
            self.sent.pop(name, None)
            if not isinstance(action, Send):
                continue
            self.sent[name] = action
            took_s = action.predicted_ttft_s * self.dice.lognormvariate(0.0, 0.3) + 0.001
            if self.dice.random() < 0.03:
                self.at(self.dice.random() * took_s, self.dice.choice(["retry", "finish"]), name)
            else:
                self.at(took_s, "first", name)
                self.at(took_s + self.dice.expovariate(1.0), "finish", name)

    def run(self, seconds: float) -> None:
        for name in list(self.shaper.backends):
            self.do(self.shaper.backend_up(name, 0.0))
            self.peer.backend_up(name, 0.0)
        self.at(0.1, "arrive")
        self.at(5.0, "operator")
        if self.shared:
            self.at(0.05, "news")
        while self.events and self.now < seconds:
            wake = self.shaper.wake_at()
            if wake <= self.events[0][0]:
                self.now = max(self.now, wake)
                self.do(self.shaper.wake(self.now))
                continue
            self.now, _, kind, of = heapq.heappop(self.events)
            self.event(kind, of)
        self.shaper.settle(inf)
        recorder = self.shaper.recorder
        for record in [*recorder.receipts.ended.values()]:
            told = [record.id, record.rule, record.value, record.limit, record.state]
            told += [record.predicted_s, record.matched_tokens, record.hindsight, record.tries]
            steps = [(step.at, step.kind, step.backend, step.why) for step in record.steps]
            self.explained.text(repr((told, steps, sorted(record.waits.items()))))

    def event(self, kind: str, of: str) -> None:
        shaper, dice, now = self.shaper, self.dice, self.now
        if kind == "arrive":
            request = self.request()
            self.queued.add(request.id)
            self.do(shaper.arrive(request, now))
            if request.id in self.queued and dice.random() < 0.05:
                self.at(dice.random(), "cancel", request.id)
            self.at(dice.expovariate(self.rate), "arrive")
        elif kind == "cancel" and of in self.queued and of not in self.sent:
            self.queued.discard(of)
            self.do(shaper.cancel(of, now))
        elif kind == "news":
            self.news()
        elif kind == "operator":
            self.operator()
            self.at(dice.expovariate(0.3), "operator")
        if of not in self.sent:
            return
        if kind == "first" and self.sent[of].request.streams:
            self.do(shaper.first_token(of, now))
        elif kind == "retry":
            self.queued.add(of)
            del self.sent[of]
            self.do(shaper.retry(of, now))
        elif kind == "finish":
            send = self.sent.pop(of)
            if dice.random() < 0.8:
                cached = dice.choice([None, send.matched_tokens, send.matched_tokens, 0])
                asked = send.request
                counted = dice.choice([0, asked.prompt_tokens, int(1.1 * asked.prompt_tokens)])
                answer = max(1, int(asked.output_tokens * dice.random() / 4))
                shaper.used(of, answer, now, cached, counted)
            self.do(shaper.finish(of, now))

    def news(self) -> None:
        """Another proxy works beside this one, and both exchange their state."""
        dice, now = self.dice, self.now
        if dice.random() < 0.3:
            request = self.request()
            for action in self.peer.arrive(request, now):
                if isinstance(action, Send):
                    self.peer.first_token(action.request.id, now)
                    if dice.random() < 0.9:
                        self.peer.finish(action.request.id, now)
        if dice.random() < 0.98:
            self.do(self.shaper.peering.reported("peer", self.peer.peering.report(now), now))
            self.peer.peering.reported("self", self.shaper.peering.report(now), now)
        else:
            self.do(self.shaper.peering.gone("peer", now))
        self.do(self.shaper.peering.forget_silent(now))
        self.at(0.1, "news")

    def operator(self) -> None:
        shaper, dice, now = self.shaper, self.dice, self.now
        names = list(shaper.backends)
        name = dice.choice(names)
        what = dice.randrange(7)
        if what == 0:
            self.do(shaper.backend_down(name, now, dice.random() < 0.5))
        elif what == 1:
            self.do(shaper.backend_up(name, now, None, dice.choice([0, 1, 1 << 30])))
        elif what == 2 and len(names) < 14:
            spec = self.spec()
            self.do(shaper.changes.add_backend(spec, now))
            self.do(shaper.backend_up(spec.name, now))
        elif what == 3 and len(names) > 2:
            self.do(shaper.changes.drain_backend(name, now))
        elif what == 4:
            backend = shaper.backends[name]
            if backend.draining and backend.empty and len(names) > 1:
                self.do(shaper.changes.remove_backend(name, now))
        elif what == 5:
            spec = replace(shaper.backends[name].spec, max_concurrency=dice.choice([2, 30]))
            self.do(shaper.changes.change_backend(spec, now, moved=dice.random() < 0.2))
        else:
            buckets = self.buckets(dice.choice([131_072, 60_000]))
            self.do(
                shaper.changes.reconfigure(
                    buckets, now, route=warm_or_least_work, affinity=Affinity(),
                    dispatch_ahead_s=0.3, tenants=self.tenants if self.fair else (),
                )
            )  # fmt: skip
        for other in names:  # most of the time most of them are up
            if dice.random() < 0.5 and other in shaper.backends:
                self.do(shaper.backend_up(other, now))


def scrambled(seed: int) -> str:
    run = Scramble(seed)
    run.run(120.0)
    return f"{run.digest}; explained {run.explained}"


CASES: tuple[tuple[str, ...], ...] = (
    *(("scrambled", str(seed)) for seed in SCRAMBLED),
    *product(KINDS, LOADS, FLEETS),
)


def of_case(case: tuple[str, ...]) -> str:
    return scrambled(int(case[1])) if case[0] == "scrambled" else simulated(*case)


def hashes(chosen: Sequence[tuple[str, ...]], jobs: int) -> dict[str, str]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return dict(zip(map("; ".join, chosen), pool.map(of_case, chosen), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the hashes of today")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    found = hashes(CASES, options.jobs)
    if options.write:
        KEPT.write_text(json.dumps(found, indent=0) + "\n")
        print(f"{len(found)} hashes in {KEPT}")
        return
    kept = json.loads(KEPT.read_text())
    other = [name for name, value in found.items() if kept.get(name) != value]
    print(f"{len(found)} runs: {len(found) - len(other)} decide as kept, {len(other)} do not")
    for name in other[:20]:
        print(f"  {name}: {found[name]}, kept {kept.get(name)}")
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    print(f"hash of all: {digest}")
    sys.exit(bool(other))


if __name__ == "__main__":
    main()
