"""Which resource the GPUs run out of: compute for prefills or decoding, KV cache, or seats. Pure.

Busy time, memory and seats are counted in the simulation; whether memory or seats bind is asked
of it too: the same fleet with twice of it either meets the targets or does not.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.analysis.sizing.floor import alone
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import Simulated

_ROUND = 512  # prompts are priced in steps of so many tokens, so that few differ


@dataclass(frozen=True, slots=True)
class Usage:
    """What a fleet's resources were used for, while requests arrived.

    Attributes:
        prefill_s: seconds of prefill alone, of all requests served, by GPU and second.
        work_s: engine seconds by GPU and second of arrivals; above 1 a backlog grew.
        kv_mean, kv_peak: tokens of the requests in an engine as a share of its pool, over time
            and engines, and the most at once; above 1 some wait in the engine. A common document
            counts once while it is read; what is only cached does not count.
        seats_peak: requests in one engine at most.
    """

    prefill_s: float
    work_s: float
    kv_mean: float
    kv_peak: float
    seats_peak: int
    seats: int

    @property
    def prefill_part(self) -> float:
        """Prefill's share of the work."""
        return min(1.0, self.prefill_s / self.work_s) if self.work_s else 0.0


def usage(simulated: Simulated, until_s: float) -> Usage:
    """Count the resources; arrivals went on until `until_s`."""
    scenario = simulated.scenario
    config = scenario.engine
    request_s = config.step_constants().request_s
    longest = config.context - 1
    pool = (config.num_blocks() - 1) * config.block_size
    changes: list[tuple[float, int, SimOutcome]] = []
    prefill_s = ended_s = 0.0
    for one in simulated.outcomes:
        if one.sent_s is None or one.finished_s is None:
            continue
        row, ended_s = one.request, max(ended_s, one.finished_s)
        prompt = min(longest, -(-row.input_tokens // _ROUND) * _ROUND)
        cached = min(one.cached_tokens // _ROUND * _ROUND, prompt - 1)
        prefill_s += alone(config, prompt, 1, cached).ttft_s - request_s
        changes += [(one.sent_s, 1, one), (one.finished_s, -1, one)]
    changes.sort(key=lambda change: change[:2])
    held: Counter[str] = Counter()  # tokens of requests in each engine
    seats: Counter[str] = Counter()
    readers: Counter[tuple[str, str]] = Counter()  # of each common document in each engine
    area = before_s = 0.0
    peak = most = total = 0
    for at, sign, one in changes:
        area += total * (at - before_s)
        before_s = at
        engine, row = one.backend or "", one.request
        tokens = row.input_tokens + row.output_tokens
        if row.blocks and row.document:
            key = engine, row.document
            others = readers[key] if sign > 0 else readers[key] - 1
            readers[key] += sign
            if others:
                tokens -= row.input_tokens // row.block_tokens * row.block_tokens
        held[engine] += sign * tokens
        seats[engine] += sign
        total += sign * tokens
        peak, most = max(peak, held[engine]), max(most, seats[engine])
    per = until_s * scenario.gpus
    return Usage(
        prefill_s=prefill_s / per,
        work_s=sum(simulated.busy) * ended_s / per,
        kv_mean=area / (per * pool),
        kv_peak=peak / pool,
        seats_peak=most,
        seats=min(scenario.slots, config.seqs),
    )


@dataclass(frozen=True, slots=True)
class Binding:
    """The resource that binds, and the sentence that says how that was seen."""

    resource: str
    why: str


def binding(
    at: Usage, missed: list[str], more_kv: Sequence[bool], more_slots: Sequence[bool], gpus: int
) -> Binding:
    """What binds a fleet of `gpus` that misses the targets named in `missed`.

    Args:
        more_kv, more_slots: of the seeds that missed, which met them with twice the KV cache and
            with twice the slots; empty where that was not asked.
    """
    load = (
        f"at {gpus} GPUs engines work {min(1.0, at.work_s):.0%} of the time, "
        f"{at.prefill_part:.0%} of that in prefills; requests hold {at.kv_mean:.0%} of the KV cache"
        f" on average, {at.kv_peak:.0%} of one at most; up to {at.seats_peak} of {at.seats} slots"
    )
    if more_kv and all(more_kv):
        return Binding(
            "KV cache",
            "twice the KV cache would meet the targets: it holds more requests, and more documents"
            f" stay cached; {load}",
        )
    if more_slots and all(more_slots):
        return Binding("slots", f"twice the slots would meet the targets; {load}")
    kept = f"with twice the KV cache {sum(more_kv)} of the {len(more_kv)} seeds that missed meet"
    if at.prefill_part < 0.5:
        return Binding("decode", f"decode steps fill the time; {kept}; {load}")
    stalls = any(name.rpartition(".")[2].startswith(("tpot", "stall")) for name in missed)
    queues = any(name.rpartition(".")[2].startswith(("ttft", "e2e")) for name in missed)
    how = " and ".join(
        ["prompts queue behind the prefills of others"] * queues
        + ["answers stand still while a prefill's chunk runs beside them"] * stalls
    )
    return Binding("prefill compute", f"{how}; {kept}; {load}")
