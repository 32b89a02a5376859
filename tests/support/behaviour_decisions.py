"""Traces whose admissions are judged in hindsight, each at a share of two engines' capacity."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from admission_hindsight import RejectionHindsight, TtftTargets, judge

from forebay.replay.plan.schedule import TRACE_ARRIVALS
from forebay.replay.sim.capacity import capacity_per_s
from forebay.replay.sim.scenario import Scenario
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents

ROWS = 1_500  # of each trace: seconds of work for a run
FILES = {
    "Mooncake conversation": "mooncake_conversation_head.jsonl",
    "Mooncake synthetic": "mooncake_synthetic_head.jsonl",
    "Azure code": "AzureLLMInferenceTrace_code.csv",
    "Azure conversation": "AzureLLMInferenceTrace_conv_head.csv",
}
MADE = "chat beside documents"
SCENARIO = Scenario()
TARGETS = TtftTargets(SCENARIO, {b.name: b.target_s for b in DEFAULT_BUCKETS})
Rows = Sequence[TraceRequest]


def rows(name: str, folder: Path | None, seed: int = 1) -> Rows:
    """The first rows of a trace, with the trace's times."""
    if name == MADE:
        spec = ChatBesideDocuments(
            chat_rate_per_s=4.0, document_rate_per_s=0.2, duration_s=400.0, seed=seed
        )
        return list(chat_beside_documents(spec))[:ROWS]
    assert folder is not None
    workload = SimWorkload(folder / FILES[name], too_long="drop")
    return workload.source(SCENARIO.engine.context)[:ROWS]


def judged(trace: Rows, load: float) -> RejectionHindsight:
    """The trace at a share of capacity, for first tokens of chats in 2 s, of documents in 15 s."""
    capacity = capacity_per_s(trace, SCENARIO.engine, SCENARIO.gpus)
    workload = replace(SimWorkload(trace), load=load, arrivals=TRACE_ARRIVALS)
    paced, _ = workload.requests(SCENARIO.engine.context, lambda _: capacity)
    return judge(paced, TARGETS)
