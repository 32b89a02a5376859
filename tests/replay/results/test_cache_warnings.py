"""A run that found its prompts in the servers' caches reports it; a cold run never does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stages.replay_server import on_engine

from forebay.analysis.compare.compare import compare
from forebay.analysis.compare.headline import headline
from forebay.analysis.runs.load import load_run
from forebay.replay.plan.source import TraceSource
from forebay.replay.results.cache_warnings import cache_warnings, most_hits
from forebay.replay.runner import Summary
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.text import prompt_text

ENGINE_BLOCK_BYTES = 64
CLAIM = 10**12  # more than any trace shares: what it does share is told


class Cache:
    """An engine's own, without end: full blocks of 16 tokens of text."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def serve(self, request: TraceRequest) -> int:
        """The tokens of `request` found here; then it is here too."""
        text = prompt_text(request, "")
        heads = [text[:end] for end in range(ENGINE_BLOCK_BYTES, len(text) + 1, ENGINE_BLOCK_BYTES)]
        hits = next((at for at, head in enumerate(heads) if head not in self._seen), len(heads))
        self._seen.update(heads)
        return 16 * hits


def asking(number: int, blocks: Sequence[int], tail: int = 512, **more: Any) -> TraceRequest:
    """A request of those blocks, the last with `tail` tokens."""
    tokens = 512 * (len(blocks) - 1) + tail
    return TraceRequest(f"r{number}", number * 0.1, tokens, 2, blocks=tuple(blocks), **more)


def told(requests: Sequence[TraceRequest], cached: int) -> int | None:
    tokens = sum(request.input_tokens for request in requests)
    return most_hits(requests, tokens, tokens, cached)


@given(st.data())
def test_cold_caches_never_hit_more(data: st.DataObject) -> None:
    """In any order of service, whichever answers got lost."""
    prompts = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(8, 512))
    drawn = data.draw(st.lists(prompts, min_size=1, max_size=6))
    requests = [asking(number, *one) for number, one in enumerate(drawn)]
    cache = Cache()
    served = data.draw(st.permutations(requests))
    hits = {request.id: cache.serve(request) for request in served}
    answered = data.draw(st.lists(st.sampled_from(requests), unique_by=lambda one: one.id))
    tokens = sum(request.input_tokens for request in answered)
    shared = most_hits(requests, tokens, tokens, CLAIM)
    assert shared is not None
    assert sum(hits[request.id] for request in answered) <= shared


def test_what_was_there_before_is_seen() -> None:
    requests = [asking(number, (0, 1, 2, 10 + number)) for number in range(10)]
    cache = Cache()
    cold = sum(map(cache.serve, requests))
    assert cold == 9 * 3 * 512
    assert told(requests, cold) is None
    again = sum(map(cache.serve, requests))
    assert told(requests, again) == cold


def test_a_little_more_is_no_sign() -> None:
    """A request that was tried twice found its own first try."""
    requests = [asking(number, (number,)) for number in range(4)]
    assert told(requests, 512) is None
    assert told(requests, 513) == 0
    requests = [asking(number, (number,)) for number in range(100)]
    assert told(requests, 1024) is None  # 2 %
    assert told(requests, 1025) == 0


def test_what_the_server_adds_to_every_prompt_may_be_shared() -> None:
    requests = [asking(number, (number,), tail=64) for number in range(100)]
    assert most_hits(requests, 6400, 6400 + 4000, 3968) is None  # a chat template of 40 tokens
    assert most_hits(requests, 6400, 6400 + 4000, 9000) == 4000


def test_prompts_of_known_length_alone_share_nothing() -> None:
    requests = [TraceRequest(f"r{at}", 0.0, 1000, 1) for at in range(20)]
    assert told(requests, 19 * 992) == 0
    assert told([requests[0]] * 20, 19 * 992) is None  # one id, one prompt


def test_text_of_the_trace_is_not_judged() -> None:
    """Text of the trace is sent unsalted, so --salt would not help."""
    requests = [asking(0, (0,)), TraceRequest("r1", 0.0, 1000, 1, text="x " * 1000)]
    assert told(requests, 1400) is None


def test_it_reads_no_further_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[TraceRequest] = []

    def reading(requests: Sequence[TraceRequest]) -> Any:
        for request in requests:
            read.append(request)
            yield request

    requests = [asking(number, (0, 1)) for number in range(1000)]
    assert most_hits(reading(requests), 1_024_000, 1_024_000, 102_400) is None
    assert len(read) < 100
    read.clear()
    monkeypatch.setattr("forebay.replay.results.cache_warnings.MOST_BLOCKS", 100)
    assert most_hits(reading(requests), 1_024_000, 1_024_000, CLAIM) is None
    assert len(read) == 51


def test_a_trace_that_has_changed_meanwhile_costs_no_run(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"id": "a", "arrival_s": 0, "input_tokens": 5000, "output_tokens": 1}\n')
    source = TraceSource(path)
    summary = {"prompt_tokens": 5000, "cached_tokens": 4992}
    assert len(cache_warnings(source, 1, 5000, summary)) == 1
    path.write_bytes(b"rubbish\n")
    assert cache_warnings(source, 1, 5000, summary) == []


# ---- whole runs against a simulated engine, in virtual time


def warnings(runs: list[Summary]) -> list[list[str]]:
    for one in runs:
        kept = orjson.loads((one.folder / "summary.json").read_bytes())
        assert kept["warnings"] == one.values["warnings"]
    return [one.values["warnings"] for one in runs]


def test_a_second_run_says_that_it_met_warm_caches(tmp_path: Path) -> None:
    trace = [asking(number, (0, 1, 2, 10 + number), tail=64) for number in range(20)]
    runs = on_engine(tmp_path, trace, {}, {}, {"salt": "b"}, {"salt": "b"}, {"salt": "c"})
    assert [len(found) for found in warnings(runs)] == [0, 0, 0, 1, 0]
    (line,) = runs[3].values["warnings"]
    cold, warm = (load_run(one.folder) for one in runs[2:4])
    assert "the runs differ in warm caches at the start" in headline(compare(cold, warm)).summary
    assert "\n" not in line
    assert line.startswith("the caches were warm: 31,")
    assert "of 32,000 prompt tokens" in line
    assert f"share {19 * 3 * 512:,} at most; without --salt" in line


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_run_of_one_shared_document_is_cold(tmp_path: Path, endpoint: str) -> None:
    trace = [asking(number, (*range(20), 100 + number), tail=64) for number in range(30)]
    runs = on_engine(tmp_path, trace, {"endpoint": endpoint})
    assert runs[0].values["hit_ratio"] > 0.9
    assert warnings(runs) == [[]]


def test_only_what_was_sent_explains_hits(tmp_path: Path) -> None:
    """The rows that share come after the cut; the ones before it share nothing."""
    alone = [asking(number, (number, 100 + number)) for number in range(10)]
    sharing = [asking(number, (50, 51, 52, 53)) for number in range(10, 60)]
    cut = {"duration_s": 1.0, "salt": "a"}
    assert [len(found) for found in warnings(on_engine(tmp_path, alone + sharing, cut, cut))] == [
        0,
        1,
    ]


def test_rows_that_were_dropped_explain_nothing(tmp_path: Path) -> None:
    alone = [asking(number, (number, 100 + number)) for number in range(10)]
    long = [asking(number, range(1000, 1100)) for number in range(10, 20)]
    drop = {"too_long": "drop", "max_model_len": 2000, "salt": "a"}
    assert [len(found) for found in warnings(on_engine(tmp_path, alone + long, drop, drop))] == [
        0,
        1,
    ]
    cut = {"too_long": "truncate", "max_model_len": 2000, "salt": "b"}
    runs = on_engine(tmp_path / "cut", long, cut, cut)
    assert warnings(runs)[0] == []
    assert runs[0].values["hit_ratio"] > 0.8


def test_a_server_that_does_not_count_is_not_judged() -> None:
    source = TraceSource([asking(0, (0,))])
    assert cache_warnings(source, 1, 512, {"prompt_tokens": 512, "cached_tokens": None}) == []
