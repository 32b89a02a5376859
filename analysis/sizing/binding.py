"""Find the scarce resource: compute for prefill or decoding, KV cache, or slots. Pure.

Busy time, memory and slots are counted in the simulation. Whether memory or slots bind is
simulated too: the same fleet with twice as much either meets the targets or does not.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.analysis.sizing.floor import alone, usable_tokens
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import Simulated

_ROUND = 512  # prompt lengths are rounded to this many tokens, so that few prefills differ


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of a fleet's resources while requests arrived.

    Attributes:
        prefill_s: prefill seconds of all served requests, per GPU and second of arrivals.
        work_s: engine seconds per GPU and second of arrivals; above 1, a backlog grew.
        kv_mean, kv_peak: tokens of the requests in an engine as a share of its KV cache: the mean
            over time and engines, and the peak. Above 1, requests wait in the engine. A common
            document counts once while it is in use; Blocks that are only cached do not count.
        seats_peak: the most requests in one engine.
    """

    prefill_s: float
    work_s: float
    kv_mean: float
    kv_peak: float
    seats_peak: int
    seats: int

    @property
    def prefill_part(self) -> float:
        """Share of the work that is prefill."""
        return min(1.0, self.prefill_s / self.work_s) if self.work_s else 0.0


def usage(simulated: Simulated, until_s: float) -> Usage:
    """Measure the use of resources. Arrivals continued until `until_s`."""
    scenario = simulated.scenario
    config = scenario.engine
    times = config.step_constants().server_times()
    longest = config.context - 1
    pool = usable_tokens(config)
    # Times when a request enters and leaves an engine, and the time of all prefills alone.
    changes: list[tuple[float, int, SimOutcome]] = []
    prefill_s = ended_s = 0.0
    for outcome in simulated.outcomes:
        if outcome.sent_s is None or outcome.finished_s is None:
            continue
        row, ended_s = outcome.request, max(ended_s, outcome.finished_s)
        prompt = min(longest, -(-row.input_tokens // _ROUND) * _ROUND)
        cached = min(outcome.cached_tokens // _ROUND * _ROUND, prompt - 1)
        prefill_s += alone(config, prompt, 1, cached).ttft_s - times.alone_s(prompt)
        changes += [(outcome.sent_s, 1, outcome), (outcome.finished_s, -1, outcome)]
    changes.sort(key=lambda change: change[:2])
    # Walk through the times. Requests of one document share its blocks in an engine.
    used: Counter[str] = Counter()  # tokens of the requests in each engine
    seats: Counter[str] = Counter()
    readers: Counter[tuple[str, str]] = Counter()  # requests per engine and common document
    area = before_s = 0.0
    peak = most = total = 0
    for at, sign, outcome in changes:
        area += total * (at - before_s)
        before_s = at
        engine, row = outcome.backend or "", outcome.request
        tokens = row.input_tokens + row.output_tokens
        if row.blocks and row.document:
            key = engine, row.document
            others = readers[key] if sign > 0 else readers[key] - 1
            readers[key] += sign
            if others:
                tokens -= row.input_tokens // row.block_tokens * row.block_tokens
        used[engine] += sign * tokens
        seats[engine] += sign
        total += sign * tokens
        peak, most = max(peak, used[engine]), max(most, seats[engine])
    # Means are over the whole time and all engines.
    per = until_s * scenario.gpus
    return Usage(
        prefill_s=prefill_s / per,
        work_s=sum(simulated.busy) * ended_s / per,
        kv_mean=area / (per * pool),
        kv_peak=peak / pool,
        seats_peak=most,
        seats=min(scenario.slots, config.seqs),
    )


def closest(at: Usage) -> str:
    """Name the most used resource of a fleet of one server: it would bind next."""
    kinds = {"prefill compute": at.prefill_s, "decode": max(0.0, at.work_s - at.prefill_s)}
    used = {**kinds, "KV cache": at.kv_peak, "slots": at.seats_peak / at.seats}
    most = max(used, key=lambda name: used[name])
    return (
        f"none, one is enough; {most} is used most, {used[most]:.0%}: engines are busy "
        f"{min(1.0, at.work_s):.0%} of the time, {at.prefill_part:.0%} of that with prefills; "
        f"{at.kv_peak:.0%} of the KV cache and {at.seats_peak} of {at.seats} slots at the peak"
    )


@dataclass(frozen=True, slots=True)
class Binding:
    """The scarce resource, and a sentence with the evidence."""

    resource: str
    why: str


def binding(
    at: Usage,
    missed: list[str],
    more_kv: Sequence[bool],
    more_slots: Sequence[bool],
    fleet: str,
) -> Binding:
    """Find the scarce resource of a fleet, such as `2 servers`, that misses the targets `missed`.

    Args:
        more_kv, more_slots: True for each missed seed that met the targets with twice the KV cache,
            or twice the slots. Empty if that was not simulated.
    """
    # Twice the KV cache or twice the slots would help: that resource is scarce.
    load = (
        f"with {fleet}, engines are busy {min(1.0, at.work_s):.0%} of the time, "
        f"{at.prefill_part:.0%} of that with prefills; requests use {at.kv_mean:.0%} of the KV"
        f" cache on average, {at.kv_peak:.0%} at the peak, and {at.seats_peak} of {at.seats} slots"
    )
    if more_kv and all(more_kv):
        return Binding(
            "KV cache",
            "twice the KV cache would meet the targets: more requests fit, and more documents"
            f" stay cached; {load}",
        )
    if more_slots and all(more_slots):
        return Binding("slots", f"twice the slots would meet the targets; {load}")
    # Otherwise it is the time of steps: for decodes, or for prefills.
    memory = (
        f"with twice the KV cache, {sum(more_kv)} of the {len(more_kv)} seeds that missed meet the"
        " targets"
    )
    if at.prefill_part < 0.5:
        return Binding("decode", f"decode steps fill the time; {memory}; {load}")
    stalls = any(name.rpartition(".")[2].startswith(("tpot", "stall")) for name in missed)
    queues = any(name.rpartition(".")[2].startswith(("ttft", "e2e")) for name in missed)
    how = " and ".join(
        ["prompts wait for other prefills"] * queues
        + ["answers stall while a chunk of a prefill runs"] * stalls
    )
    return Binding("prefill compute", f"{how}; {memory}; {load}")
