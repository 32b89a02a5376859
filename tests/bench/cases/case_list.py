"""The cases by which other projects measure their routers: fleet, traffic, capacity, source."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from case_traces import (
    Conversations,
    FixedPrompts,
    Make,
    Pieces,
    Prompts,
    Published,
    exponential,
    fixed,
    geometric,
    lognormal,
    normal,
    uniform,
)
from fakes.kv_models import CONFIGS
from paths import SHARED

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.find import find_model
from forebay.replay.engine.hardware.specs import ModelSpec

CONVERSATION = SHARED / "data" / "traces" / "mooncake_conversation_head.jsonl"
LONG = 131_072  # positions of Qwen3 with its documented YaRN factor 4


@lru_cache
def model(name: str, positions: int = 0) -> ModelSpec:
    """Return a model of `kv_models`, with more positions if these are given."""
    config: dict[str, Any] = dict(CONFIGS[name])
    if positions:
        config["max_position_embeddings"] = positions
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config), encoding="utf-8")
        found = find_model(str(path))
    return replace(found, name=name.rpartition("/")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case.

    Attributes:
        make: its requests.
        engine: makes the options of each engine.
        engines: how many engines.
        capacity: requests a second at which the best of Forebay, SMG, llm-d and least connections
            has 90 % in time (the policy of commit dca18361).
        vendor: the load of the vendor's own run; () where it has no rate, or is not known.
        own_target: TTFT and TPOT, seconds, that the vendor asks for.
        needs: a file that it needs.
        waits: turns wait for the answers before them; else they come at set times.
    """

    make: Make
    engine: Callable[[], EngineConfig]
    engines: int
    capacity: float
    own_target: tuple[float, float] = (2.0, 0.1)
    vendor: Pieces = ()
    needs: Path | None = None
    waits: bool = False

    @property
    def seconds(self) -> float:
        """Return 300 s, or as long as 1,000 requests take at capacity, 500 s at most."""
        return min(500.0, max(300.0, 1_000 / self.capacity))

    @property
    def missing(self) -> bool:
        return self.needs is not None and not self.needs.exists()


def qwen_32b(gpu: str, positions: int = 0) -> Callable[[], EngineConfig]:
    return lambda: EngineConfig(model("Qwen/Qwen3-32B", positions), gpu, tensor_parallel_size=2)


def turns_of(mean_turns: float, heads: int, head: int, question: int, answer: int) -> Conversations:
    """Return a mix of llm-d's blog: short conversations with a shared head."""
    return Conversations(
        per_conversation=mean_turns, heads=heads, head_tokens=head, start=fixed(0),
        added=normal(question, 0.3 * question), answer=normal(answer, 0.3 * answer),
        turns=geometric(mean_turns), pause=exponential(5.0), most=39_000, before_s=60.0,
    )  # fmt: skip


def sessions(own: Make | None = None, **changes: Any) -> Conversations:
    """Return sessions of coding agents, as in llm-d's guides."""
    usual: dict[str, Any] = {
        "per_conversation": 6, "heads": 1, "head_tokens": 3_000,
        "start": uniform(15_000, 100_000), "added": lognormal(1_500, 0.8, 100, 10_000),
        "answer": lognormal(800, 0.8, 50, 4_000), "turns": normal(6, 3, 2, 20),
        "pause": fixed(0), "most": 130_000, "before_s": 120.0,
    }  # fmt: skip
    return Conversations(**usual | changes)


def toolagent(most: int) -> Prompts:
    return Prompts(
        heads=60, head=lognormal(5_600, 0.5, 1, 11_000), weight=lambda i: (i + 1) ** -1.1,
        own=lognormal(3_300, 1.2), answer=lognormal(182, 0.8, 1, 2_000), most=most,
    )  # fmt: skip


B2B_LADDER = (
    (50.0, 15.0), (20.0, 3.0), (20.0, 10.0), (20.0, 15.0), (38.0, 20.0), (34.0, 22.0),
    (30.0, 25.0), (25.0, 30.0), (21.0, 35.0), (38.0, 40.0), (36.0, 43.0), (33.0, 46.0),
    (30.0, 49.0), (29.0, 52.0), (27.0, 55.0), (26.0, 57.0), (25.0, 60.0),
)  # fmt: skip

CASES: dict[str, Case] = {
    "toolagent": Case(
        make=toolagent(38_000), engine=qwen_32b("h200"), engines=8, capacity=43.5,
        own_target=(5.0, 0.1), vendor=((300.0, 5.3),),
    ),
    "conversation": Case(
        make=Published(CONVERSATION), engine=qwen_32b("h200", LONG), engines=8, capacity=13.9,
        own_target=(2.0, 0.025), vendor=((300.0, 3.4),), needs=CONVERSATION,
    ),
    "campi": Case(
        make=toolagent(14_300), engines=8, capacity=28.2,
        engine=lambda: EngineConfig(model("Qwen/Qwen3-8B"), "a100-40gb", max_model_len=16_384),
    ),
    "b2b-saas": Case(
        make=FixedPrompts(
            heads=150, head_tokens=6_000, questions=5, question_tokens=1_200, answer_tokens=1_000
        ),
        engine=qwen_32b("h100"), engines=8, capacity=14.8, vendor=B2B_LADDER,
    ),
    "code-gen": Case(make=sessions(), engine=qwen_32b("h100", LONG), engines=10, capacity=1.16),
    "mix-a": Case(
        make=turns_of(3, 6, 1_000, 30, 1_000), engine=qwen_32b("h100"), engines=10, capacity=35.3
    ),
    "mix-b": Case(
        make=turns_of(3, 6, 1_000, 30, 3_000), engine=qwen_32b("h100"), engines=10, capacity=11.6
    ),
    "mix-c": Case(
        make=turns_of(3, 150, 6_000, 1_200, 1_000), engine=qwen_32b("h100"), engines=10,
        capacity=11.7,
    ),
    "mix-d": Case(
        make=turns_of(2.5, 150, 1_000, 6_200, 1_000), engine=qwen_32b("h100"), engines=10,
        capacity=5.96,
    ),
    "tiered": Case(
        make=FixedPrompts(
            heads=250, head_tokens=16_000, questions=5, question_tokens=256, answer_tokens=256
        ),
        engine=lambda: EngineConfig(
            model("openai/gpt-oss-120b"), "h100", max_model_len=32_768,
            gpu_memory_utilization=0.95, disable_hybrid_kv_cache_manager=True,
        ),
        engines=16, capacity=33.9, vendor=tuple((60.0, rate) for rate in range(5, 41, 5)),
    ),
    "agentic": Case(
        make=sessions(
            per_conversation=12, start=uniform(10_000, 100_000), turns=normal(12, 4, 2, 20),
            answer=lognormal(425, 0.8, 50, 4_000), pause=exponential(15.0),
        ),
        engine=lambda: EngineConfig(model("Qwen/Qwen3-30B-A3B", LONG), "h200"),
        engines=8, capacity=4.51,
    ),
    "priorities": Case(
        make=Prompts(
            own=fixed(1_000), answer=fixed(512),
            classes=(("interactive", 2), ("standard", 6), ("batch", 2)),
        ),
        engine=qwen_32b("h100"), engines=2, capacity=16.3, vendor=((90.0, 6.0),),
    ),
    "rag-8k": Case(
        make=Prompts(heads=8, head=fixed(1_600), own=fixed(6_400), answer=lognormal(300, 0.5)),
        engine=qwen_32b("h100"), engines=4, capacity=7.59,
    ),
}  # fmt: skip
CASES |= {
    f"{name}-closed": replace(CASES[name], waits=True, vendor=())
    for name in ("code-gen", "mix-a", "mix-b", "mix-c", "mix-d", "agentic")
}
