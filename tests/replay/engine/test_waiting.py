"""The order and the caps of Forebay's scheduler in the simulated engine."""

import random
from dataclasses import replace
from math import inf

import pytest

from forebay.proxy.core.learn.step_cost import StepCost
from forebay.proxy.core.policy.engine_step import EngineSteps, StepLimits
from forebay.replay.engine import waiting
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.kv_blocks.pool import BlockPool
from forebay.replay.engine.limits import SchedulerLimits, read_pause
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.scheduler import Scheduler
from forebay.traces.ground.errors import InputError


def neutral_steps(limits: SchedulerLimits) -> EngineSteps:
    """No bound, and the order of arrival."""
    return EngineSteps(
        StepLimits(
            inf, limits.max_num_batched_tokens, limits.block_size,
            limits.scheduling_policy == "priority", by_due=False,
        ),
        StepCost(),
    )  # fmt: skip


def played(limits: SchedulerLimits, blocks: int, seed: int) -> list[object]:
    """Every step of a random workload: tokens of each request, and preempted ones."""
    rng, scheduler = random.Random(seed), Scheduler(limits, BlockPool(blocks))
    steps: list[object] = []
    arrived = 0
    for now in range(400):
        while arrived < 40 and rng.random() < 0.3:
            prompt, output = rng.randint(1, 150), rng.randint(1, 30)
            shared = rng.randint(0, prompt // limits.block_size)
            hashes = list(range(rng.choice([0, 1_000]), 2_000))[:shared]
            scheduler.add(
                EngineRequest(
                    f"r{arrived}", prompt, output, hashes, arrival_s=now + arrived / 100,
                    priority=rng.randint(0, 2),
                )
            )  # fmt: skip
            arrived += 1
        if not scheduler.running and not len(scheduler.waiting):
            continue
        step = scheduler.schedule(float(now))
        steps.append(([(r.id, n) for r, n in step.tokens.items()], [r.id for r in step.preempted]))
        for request in step.sampled:
            request.tokens += 1
        scheduler.finish([r for r in step.sampled if r.output_tokens >= r.output_target])
    return steps


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_without_a_bound_and_in_order_of_arrival_it_is_vllms(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "steps_of", neutral_steps)
    monkeypatch.setattr(waiting.PlannedQueue, "_shared", lambda *_: 0)
    preempted = 0
    for seed in range(60):
        rng = random.Random(seed)
        limits = SchedulerLimits(
            max_model_len=200, max_num_batched_tokens=rng.choice([40, 100, 300]),
            max_num_seqs=rng.choice([3, 30]), block_size=8, scheduling_policy=policy,
            long_prefill_token_threshold=rng.choice([0, 0, 20]),
        )  # fmt: skip
        blocks = rng.choice([30, 60, 300])
        own = played(limits, blocks, seed)
        ours = played(replace(limits, pause_s=1.0), blocks, seed)
        assert ours == own
        preempted += sum(bool(step[1]) for step in own)  # type: ignore[index]
    assert preempted > 20


def test_priorities_come_before_the_order_of_the_decision() -> None:
    limits = SchedulerLimits(max_model_len=9_000, scheduling_policy="priority", pause_s=0.1)
    scheduler = Scheduler(limits, BlockPool(2_000))
    for name, priority in (("chat", 1), ("document", -(10**9))):
        tokens = 100 if name == "chat" else 8_000
        scheduler.add(EngineRequest(name, tokens, 5, priority=priority))
    step = scheduler.schedule(0.0)
    assert next(iter(step.tokens)).id == "document"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheduler_cls": "acme.Scheduler"}, "--scheduler-cls acme.Scheduler: "),
        ({"additional_config": "{"}, "--additional-config {: "),
        ({"additional_config": "[1]"}, "give a JSON object"),
        ({"additional_config": '{"forebay": {"paws": 1}}'}, 'has no setting "paws"'),
        ({"additional_config": '{"forebay": {"pause": 0}}'}, "pause is 0; give seconds between"),
        ({"additional_config": '{"forebay": {"pause": 100}}'}, "pause is 100; give seconds"),
        ({"additional_config": '{"forebay": {"pause": "soon"}}'}, "pause is 'soon'; give seconds"),
        ({"additional_config": '{"forebay": {"pause": NaN}}'}, "pause is nan; give seconds"),
        ({"enable_chunked_prefill": False}, "--no-enable-chunked-prefill"),
        ({"prefill_schedule_interval": 2}, "--prefill-schedule-interval"),
    ],
)
def test_bad_options_are_named(change: dict[str, object], message: str) -> None:
    options = {"scheduler_cls": "forebay", **change}
    with pytest.raises(InputError) as caught:
        EngineConfig(**options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_the_pause_is_read_beside_the_options_of_others() -> None:
    assert read_pause(None, '{"acme": 1}') == 0.0
    assert read_pause("vllm.v1.core.sched.scheduler.Scheduler", None) == 0.0
    assert read_pause("vllm", None) == 0.0
    assert read_pause("forebay", None) == 0.1
    assert read_pause("forebay.proxy.x.Y", '{"acme": 1, "forebay": {"pause": 0.25}}') == 0.25
