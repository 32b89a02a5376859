"""Compute GPU counts by the usual formulas, to compare with the simulation. Pure.

All formulas take each request as alone on its GPU. Each result states what that leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp

from forebay.analysis.sizing.floor import Alone, alone, decode_step_s, usable_tokens
from forebay.analysis.sizing.targets import LatencyTarget
from forebay.analysis.sizing.workload import DOCUMENT, Users
from forebay.proxy.config.backends import MAX_CONCURRENCY
from forebay.replay.engine.config import EngineConfig

USUAL_UTILISATION = 0.7


@dataclass(frozen=True, slots=True)
class Demand:
    """The cost of a request of mean length of one class on an idle GPU.

    Attributes:
        gpu_s: seconds of GPU time: prefill, and its part of full decode batches.
    """

    kind: str
    rate_per_s: float
    prompt: float
    output: float
    alone: Alone
    gpu_s: float


@dataclass(frozen=True, slots=True)
class Naive:
    """The result of one formula. `gpus` is None if it has no solution."""

    name: str
    gpus: int | None
    why: str


def demands(config: EngineConfig, users: Users) -> list[Demand]:
    """The demand of each class. Shared documents count as cached on every engine."""
    costs = []
    for kind, rate in users.rates_per_s().items():
        mean, output = users.mean_tokens(kind)
        prompt = max(1, round(mean))
        cold = alone(config, prompt, max(1, round(output)))
        if kind == DOCUMENT and users.shared:
            question = max(1, round(users.mean_question_tokens()))
            warm = alone(config, prompt, max(1, round(output)), cached=max(0, prompt - question))
            part = users.shared
            cold = Alone(
                (1 - part) * cold.ttft_s + part * warm.ttft_s,
                (1 - part) * cold.end_s + part * warm.end_s,
            )
        prefill_s = cold.ttft_s - config.step_constants().server_times().alone_s(prompt)
        context = prompt + output / 2
        # Slots and KV cache limit the requests that decode together.
        room = int(usable_tokens(config) / context)
        batch = max(1, min(MAX_CONCURRENCY, config.seqs, room))
        decode_s = output * decode_step_s(config, batch, context) / batch
        costs.append(Demand(kind, rate, mean, output, cold, prefill_s + decode_s))
    return costs


def erlangs(classes: Sequence[Demand]) -> float:
    """Mean number of busy GPUs (Little's law on GPU time)."""
    return sum(demand.rate_per_s * demand.gpu_s for demand in classes)


def formulas(
    config: EngineConfig, users: Users, targets: Sequence[LatencyTarget], simulated: int
) -> list[Naive]:
    """KV cache only, utilisation at 100 % and 70 %, and M/M/c."""
    classes = demands(config, users)
    offered = erlangs(classes)
    return [
        _kv_only(config, classes, offered, simulated),
        Naive(
            "utilisation 100 %",
            max(1, ceil(offered)),
            f"{offered:.1f} GPU-seconds of work arrive per second; this leaves no idle time for the"
            " variation of arrivals, so queues grow without bound"
            + ("; counts shared documents as cached on every GPU" if users.shared else ""),
        ),
        Naive(
            f"utilisation {USUAL_UTILISATION * 100:.0f} %",
            max(1, ceil(offered / USUAL_UTILISATION)),
            "a margin that ignores targets and fleet size: large fleets pool variation and need"
            " less, tight targets or long prefills need more",
        ),
        Naive(
            "M/M/c",
            _mmc(classes, targets),
            "one queue, one request per GPU, exponential service times: ignores batching, decode"
            " steps slowed by prefills (TPOT), and two kinds of requests 100x apart",
        ),
    ]


def _kv_only(
    config: EngineConfig, classes: Sequence[Demand], offered: float, simulated: int
) -> Naive:
    """Tokens in use at once (Little's law: rate x time alone x tokens) over the KV cache."""
    tokens = sum(
        demand.rate_per_s * demand.alone.end_s * (demand.prompt + demand.output)
        for demand in classes
    )
    needed = max(1, ceil(tokens / usable_tokens(config)))
    why = "counts every prompt in full; shared documents are stored once"
    if needed < offered:
        why = "the requests would fit in memory, but their prefills need the compute of more GPUs"
    elif needed <= simulated:
        why = "counts each request as alone on a GPU; together they take longer and use more memory"
    return Naive("KV cache only", needed, why)


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/c (A. K. Erlang, 1917), 1 under overload.

    Uses Erlang B's recursion, which does not overflow.
    """
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def _mmc(classes: Sequence[Demand], targets: Sequence[LatencyTarget]) -> int | None:
    """The least c with P(wait > limit - TTFT alone) <= 1 - share for every TTFT target.

    P(wait > t) = C(c, a) exp(-(c - a) t / s), s the mean service time, a the offered load.
    """
    rate, offered = sum(demand.rate_per_s for demand in classes), erlangs(classes)
    service_s = offered / rate
    waits = [
        (target.limit_s - demand.alone.ttft_s, 1 - target.share)
        for target in targets
        for demand in classes
        if target.metric == "ttft" and target.concerns(demand.kind)
    ]
    if not waits or min(wait_s for wait_s, _ in waits) < 0:
        return None
    servers = max(1, ceil(offered))
    while not all(
        erlang_c(servers, offered) * exp(-(servers - offered) * wait_s / service_s) <= miss
        for wait_s, miss in waits
    ):
        servers += 1
    return servers
