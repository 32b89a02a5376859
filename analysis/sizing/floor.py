"""Reject targets that even an idle GPU misses, so that no number of GPUs meets them. Pure.

A single request runs through the simulated engine, so chunks and overheads equal the fleet's.
FLOPs and bytes come from the roofline.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from forebay.analysis.kv.plan import Choices, check_fits, make_plan
from forebay.analysis.sizing.targets import LatencyTarget, NotMet
from forebay.analysis.sizing.workload import DOCUMENT, Users
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.find import find_gpu, find_model
from forebay.replay.engine.hardware.gpu_memory import GpuMemory
from forebay.replay.engine.placement import served_model
from forebay.replay.engine.timing.roofline import bound_by, least
from forebay.replay.engine.timing.step_time import StepWork
from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.served import run_alone
from forebay.replay.sim.scenario import Scenario
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Alone:
    """Times of a single request on an idle GPU, in seconds from its arrival."""

    ttft_s: float
    end_s: float


@lru_cache(1024)
def alone(config: EngineConfig, prompt: int, output: int = 1, cached: int = 0) -> Alone:
    """Simulate a single request whose first `cached` prompt tokens are in the prefix cache."""
    engine = Scenario(config).new_engine()
    start = now = 0.0
    ids = tuple(range(cached // BLOCK_TOKENS))
    requests = [SimRequest("alone", prompt, output, ids)]
    if ids:
        requests.insert(0, SimRequest("before", len(ids) * BLOCK_TOKENS + 1, 1, ids))
    for request in requests:
        start, now = now, run_alone(engine, request, now)
    return Alone(requests[-1].first_token_s - start, requests[-1].finished_s - start)


def usable_tokens(config: EngineConfig) -> int:
    """Return the tokens of the KV cache without the one block that vLLM keeps free."""
    return config.kv_budget.pool_tokens(config.context) - config.kv_budget.layout.block_size


def decode_step_s(config: EngineConfig, sequences: int, context: float) -> float:
    """Seconds for a token of each of `sequences` requests that decode with `context` tokens.

    It is a step, or with speculative decoding a step divided by the tokens it yields.
    """
    model, timing, speculation = config.rank_spec, config.timing(), config.speculation
    tokens = speculation.mean_tokens if speculation else 1.0
    fixed, per_token = timing.decode_terms(sequences)
    near = timing.window_s * min(context, model.sliding_window)
    return (fixed + (per_token * context + near) * sequences) / tokens


def check_memory(
    users: Users,
    *,
    model: str,
    gpu: str,
    named: str = "--document-tokens",
    tensor_parallel_size: int = 1,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    **options: Any,
) -> None:
    """Raise InputError if the model, or a request, does not fit a server or the context.

    Args:
        named: the option that set the length of documents, for the error.
        options: options of `forebay kv`. None takes vLLM's default.
    """
    rates = users.rates_per_s()
    flags = {name: value for name, value in options.items() if value is not None}
    served = served_model(find_model(model), quantization, kv_cache_dtype)
    sheet = find_gpu(gpu)
    shape = served.shape
    choices = Choices(
        tensor_parallel_size=tensor_parallel_size, kv_cache_dtype=kv_cache_dtype, **flags
    )
    plan = make_plan(shape, GpuMemory(sheet.name, sheet.memory_gib), choices)
    longest = {kind: users.prompt_tokens(kind, 1) + users.output_tokens(kind, 1) for kind in rates}
    for kind, tokens in longest.items():
        if tokens > plan.max_model_len:
            option = named if kind == DOCUMENT else "--chat-tokens"
            raise InputError(
                f"{option}: a {kind} request of {tokens:,} tokens with its answer exceeds the "
                f"context of {plan.max_model_len:,} tokens of {shape.name}; shorten it"
            )
    for length in (None, max(longest.values())):
        check_fits(plan, length)


def check_floor(config: EngineConfig, users: Users, targets: Sequence[LatencyTarget]) -> None:
    """Raise NotMet, with the limiting resource, if an idle GPU already misses a target."""
    for target in targets:
        for kind, rate in users.rates_per_s().items():
            if not target.concerns(kind):
                continue
            # The share of this class that may miss the target, if all misses are of this class.
            may_miss = (1 - target.share) * (
                1.0 if target.kind else users.rate_per_s / rate
            )  # fmt: skip
            # Common documents are cached at best, so only the others must be computed.
            cold = 1.0 - users.shared if kind == DOCUMENT else 1.0
            if cold <= may_miss + 1e-9:
                continue
            prompt = users.prompt_tokens(kind, 1 - may_miss / cold)
            if target.metric in ("ttft", "e2e"):
                _check_prefill(config, target, kind, prompt)
            else:
                _check_decode(config, target, kind, users.prompt_tokens(kind, 0.0))


def _check_prefill(config: EngineConfig, target: LatencyTarget, kind: str, prompt: int) -> None:
    took = alone(config, prompt)
    if took.ttft_s <= target.limit_s:
        return
    model, gpu = config.rank_spec, config.gpu_spec
    floor = least(model, gpu, _chunks(prompt, config.batched_tokens))
    low, high = 0, prompt
    while high - low > 1:
        middle = (low + high) // 2
        if alone(config, middle).ttft_s <= target.limit_s:
            low = middle
        else:
            high = middle
    shorter = f"a prompt of at most {low // 100 * 100:,} tokens" if low >= 100 else "a shorter one"
    helps = ", ".join([*_parallel_that_helps(config, target, prompt), shorter])
    raise NotMet(
        f"--slo {target}: a {kind} prompt of {prompt:,} tokens takes {took.ttft_s:.1f} s on an "
        f"idle {_server(config)} ({bound_by(floor, took.ttft_s)}-bound: {floor.flops / 1e15:.2f} "
        f"PFLOP a GPU at {floor.flops / took.ttft_s / 1e12:.0f} of {gpu.peak_flops / 1e12:.0f} "
        f"TFLOP/s; the data sheet alone says {floor.seconds:.1f} s), so no number of GPUs meets "
        f"it: a prefill runs on one server; {helps} or a shared prefix would"
    )


def _server(config: EngineConfig) -> str:
    """Name the GPUs of one server."""
    ranks, gpu = config.tensor_parallel_size, config.gpu_spec.name
    return gpu if ranks == 1 else f"{ranks} x {gpu}"


def _parallel_that_helps(config: EngineConfig, target: LatencyTarget, prompt: int) -> list[str]:
    """Name the least tensor parallelism with which an idle server meets the target, if any does."""
    for ranks in (2, 4, 8):
        if ranks <= config.tensor_parallel_size:
            continue
        try:
            took = alone(replace(config, tensor_parallel_size=ranks), prompt)
        except InputError:
            continue
        if took.ttft_s <= target.limit_s:
            return [f"--tensor-parallel-size {ranks} ({took.ttft_s:.1f} s)"]
    return []


def _check_decode(config: EngineConfig, target: LatencyTarget, kind: str, prompt: int) -> None:
    step_s = decode_step_s(config, 1, prompt)
    if step_s <= target.limit_s:
        return
    model, gpu = config.rank_spec, config.gpu_spec
    work = StepWork(tokens=1, sequences=1, sampled=1, decode_context=prompt)
    floor = least(model, gpu, [work])
    raise NotMet(
        f"--slo {target}: one token of one {kind} request alone takes {step_s * 1e3:.1f} ms on "
        f"{_server(config)} ({floor.bytes / 1e9:.1f} GB of weights and cache are read for it, "
        f"{floor.memory_s * 1e3:.1f} ms at {gpu.bandwidth / 1e12:g} TB/s, the rest is overhead), so"
        " no number of GPUs meets it; more --tensor-parallel-size, --quantization fp8 or a"
        " smaller model would"
    )


def _chunks(tokens: int, budget: int) -> Iterator[StepWork]:
    for start in range(0, tokens, budget):
        count = min(budget, tokens - start)
        yield StepWork(
            tokens=count,
            sequences=1,
            sampled=int(start + count == tokens),
            chunks=[(count, start)],
        )
