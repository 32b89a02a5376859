"""Where the requests of each workload come from: public traces, real documents, synthesis.

For traces that are files a seed is where the cut begins; for made ones it is the seed. Missing data
is an InputError that says how to give it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
from arena_traffic import PROBED, Source

from forebay.traces.errors import InputError
from forebay.traces.formats import open_trace
from forebay.traces.formats.readers.kv_cache_tester import interleaved, read_sessions
from forebay.traces.schema import TraceRequest
from forebay.traces.synth.arrivals import arrival_times
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.documents import Workload as Made
from forebay.traces.synth.documents import shared_document, workload
from forebay.traces.synth.lengths import Fixed, Lognormal
from forebay.traces.synth.prompts.zeroscrolls import ZeroScrollsSample
from forebay.traces.synth.prompts.zeroscrolls_trace import ordered
from forebay.traces.synth.ticks import spread_ticks


def public(name: str, ticks: bool = False, step_s: float = 120.0) -> Source:
    """A public trace from `seed * step_s` seconds on."""

    def source(seed: int, data: Path) -> Sequence[TraceRequest]:
        path = data / "traces" / name
        rows = list(open_trace(_there(path)))
        if ticks:
            rows = list(spread_ticks(rows, seed=0))
        later = [row for row in rows if row.arrival_s >= seed * step_s]
        if len(later) < PROBED:
            raise InputError(f"{path}: too short for seed {seed}; use seeds below that")
        return later

    return source


def sessions(seed: int, data: Path) -> Sequence[TraceRequest]:
    sessions = read_sessions(_there(data / "traces" / "kv_cache_tester"))
    return interleaved(sessions, start_gap_s=5.0, longest_gap_s=20.0, seed=seed)


def questions(task: str, order: str) -> Source:
    """Questions about real documents, as the ZeroSCROLLS chat prompt has them, at even gaps."""

    def source(seed: int, data: Path) -> Sequence[TraceRequest]:
        samples, answers = _samples(task, data / "docs")
        rows = []
        for number, sample in enumerate(ordered(samples, order, seed=seed, zipf_s=1.0)):
            rows.append(
                TraceRequest(
                    id=f"{task}/{sample.id}",
                    arrival_s=float(number),
                    input_tokens=max(1, len(sample.input.encode()) // 4),
                    output_tokens=answers[sample.id],
                    text=sample.input,
                    document=sample.document_sha256()[:16],
                )
            )
        return _jittered(rows, seed)

    return source


def _jittered(rows: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    times = arrival_times("poisson", 1.0, seed)
    return [replace(row, arrival_s=at_s) for row, at_s in zip(rows, times, strict=False)]


INSTRUCTIONS = {
    "squality": "You are given a story and a question. Answer the question in a paragraph.",
    "qmsum": "You are given a meeting transcript and a query. Answer it in a few sentences.",
}


def _samples(task: str, folder: Path) -> tuple[list[ZeroScrollsSample], dict[str, int]]:
    """Samples in file order, and the length of each reference answer in tokens."""
    name = {"squality": "squality-dev", "qmsum": "qmsum-val"}[task]
    documents = {row["doc_id"]: row["text"] for row in _json_lines(folder / f"{name}.docs.jsonl")}
    samples, answers = [], {}
    for row in _json_lines(folder / f"{name}.queries.jsonl"):
        head = f"{INSTRUCTIONS[task]}\n\nDocument:\n"
        text = documents[row["doc_id"]]
        tail = f"\n\nQuestion:\n{row['query']}"
        end = len(head) + len(text)
        samples.append(
            ZeroScrollsSample(
                task, row["id"], head + text + tail, len(head), end, end, end + len(tail), ""
            )
        )
        answers[row["id"]] = max(16, len(row["ref_output"].encode()) // 4)
    return samples, answers


def _json_lines(path: Path) -> list[dict[str, str]]:
    return [orjson.loads(line) for line in _there(path).read_bytes().splitlines() if line.strip()]


def _there(path: Path) -> Path:
    if not path.exists():
        raise InputError(f"{path}: not there; give the folder of the public traces with --data")
    return path


def beside(seed: int, data: Path) -> Sequence[TraceRequest]:
    spec = ChatBesideDocuments(
        chat_rate_per_s=4.0, document_rate_per_s=0.15, questions=5, duration_s=900.0, seed=seed
    )
    return list(chat_beside_documents(spec))


def shared(seed: int, data: Path) -> Sequence[TraceRequest]:
    spec = Made(
        users=50, documents=16, zipf_s=1.0,
        document_tokens=Lognormal(30_000, 0.6, 10_000, 100_000), chat_share=0.4,
        instruction_tokens=1_024, rate_per_s=2.0, duration_s=None, requests=3_000, seed=seed,
    )  # fmt: skip
    return list(workload(spec))


def fifty(seed: int, data: Path) -> Sequence[TraceRequest]:
    return list(
        shared_document(users=50, document_tokens=60_000, arrivals="poisson", rate_per_s=10.0,
                        instruction_tokens=1_024, seed=seed)
    )  # fmt: skip


def small_beside(seed: int, data: Path) -> Sequence[TraceRequest]:
    """The same for a model whose context is 16k, on a CPU."""
    spec = ChatBesideDocuments(
        chat_rate_per_s=4.0, document_rate_per_s=0.5, questions=5, follow_gap_s=6.0,
        document_tokens=Fixed(14_000), chat_tokens=Lognormal(400, 0.6, 50, 2_000),
        chat_output_tokens=Lognormal(60, 0.5, 8, 150), output_tokens=Fixed(32),
        duration_s=600.0, seed=seed,
    )  # fmt: skip
    return list(chat_beside_documents(spec))


def small_shared(seed: int, data: Path) -> Sequence[TraceRequest]:
    spec = Made(
        users=50, documents=12, zipf_s=1.0,
        document_tokens=Lognormal(8_000, 0.3, 5_500, 12_000), chat_share=0.4,
        chat_tokens=Lognormal(400, 0.6, 50, 2_000), chat_output_tokens=Lognormal(60, 0.5, 8, 150),
        output_tokens=Fixed(32), instruction_tokens=1_024, rate_per_s=2.0, duration_s=None,
        requests=2_000, seed=seed,
    )  # fmt: skip
    return list(workload(spec))


def small_fifty(seed: int, data: Path) -> Sequence[TraceRequest]:
    return list(
        shared_document(users=50, document_tokens=14_000, output_tokens=32, arrivals="poisson",
                        rate_per_s=10.0, instruction_tokens=1_024, seed=seed)
    )  # fmt: skip
