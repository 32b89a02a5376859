"""The workloads: what is asked, at which share of capacity, for how long, to which targets."""

from collections.abc import Sequence
from dataclasses import replace

from routers.traffic import Course

from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.documents import Workload, workload
from forebay.traces.synth.lengths import Lognormal

# A percentile of documents needs some hundred of them, and a queue that grows needs time to do so.
SUSTAINED_S = 120.0
CHUNK = 2_048  # what `forebay fleet up` gives this model on this GPU (replay/fleet/gpu/profiles.py)
LOADS = (1.5, 2.0, 1.0, 0.5, 3.0)


def beside(seed: int) -> Sequence[TraceRequest]:
    spec = ChatBesideDocuments(
        chat_rate_per_s=4.0, document_rate_per_s=0.15, questions=5, duration_s=900.0, seed=seed
    )
    return list(chat_beside_documents(spec))


def shared(seed: int) -> Sequence[TraceRequest]:
    spec = Workload(
        users=50, documents=16, zipf_s=1.0,
        document_tokens=Lognormal(30_000, 0.6, 10_000, 100_000), chat_share=0.4,
        instruction_tokens=1_024, rate_per_s=2.0, duration_s=None, requests=3_000, seed=seed,
    )  # fmt: skip
    return list(workload(spec))


def _chunked(course: Course) -> Course:
    """The same traffic in front of engines that split long prefills themselves."""
    return replace(
        course, name=f"{course.name}, chunked", chunk=CHUNK, traffic_of=course.name,
        about=f"{course.about}. Engines take {CHUNK:,} tokens of one prompt in a step at most",
    )  # fmt: skip


def _courses() -> Sequence[Course]:
    """Every course with its twin on engines that split prefills, the most telling ones first."""
    plain = (
        Course(
            "documents", "chat beside 120k-token documents, five questions each, at 80 % load",
            beside,
        ),
        Course(
            "shared documents", "50 users, 16 documents of 10k-100k tokens (Zipf 1.0), 40 % chat, "
            "a common instruction of 1,024 tokens, at 80 % load", shared, window_s=SUSTAINED_S,
        ),
        *(
            Course(
                f"overload {load:g}x", f"the documents again at {load:g} times capacity", beside,
                load, window_s=SUSTAINED_S,
            )
            for load in LOADS
        ),
    )  # fmt: skip
    return [twin for course in plain for twin in (course, _chunked(course))]


COURSES = {course.name: course for course in _courses()}
