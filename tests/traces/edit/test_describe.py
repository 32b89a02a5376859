"""`describe`: statistics and ideal hit ratios of traces."""

from collections import Counter
from random import Random
from statistics import fmean, pstdev, pvariance

import pytest
from common_start import common_length
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import SHARED

from forebay.traces.edit.describe import describe
from forebay.traces.edit.sharing import IdealCache
from forebay.traces.formats import open_trace
from forebay.traces.ground.schema import TraceRequest

TRACES = SHARED / "data" / "traces"
needs_data = pytest.mark.skipif(not TRACES.is_dir(), reason="no ../shared/data")


def lengths_only(arrival_s: float, tokens: int = 10) -> TraceRequest:
    return TraceRequest("a", arrival_s, tokens, tokens)


def test_a_small_trace_by_hand() -> None:
    found = describe(
        [
            TraceRequest("a", 0.0, 1000, 1, blocks=(0, 1), session="s"),
            TraceRequest("b", 1.0, 1100, 2, blocks=(0, 1, 2), session="s", document="d"),
            TraceRequest("c", 1.5, 512, 3, blocks=(0,), session="t", document="e"),
            TraceRequest("d", 4.0, 600, 4, blocks=(5, 1)),  # 1 is no prefix here
        ]
    )
    assert (found.requests, found.duration_s, found.rate_per_s) == (4, 4.0, 1.0)
    gaps = [1.0, 0.5, 2.5]
    assert found.interarrival_cv == pytest.approx(pstdev(gaps) / fmean(gaps))
    # b finds blocks 0 and 1 whole (1,024), c all of its 512, a and d nothing.
    assert found.ideal_hit_ratio == (1024 + 512) / (1000 + 1100 + 512 + 600)
    assert found.reuse_share == 2 / 4
    assert (found.sessions, found.documents) == (2, 2)
    assert found.peak_rate_1s == 2.0
    assert found.peak_rate_60s is None
    assert found.dispersion_60s is None
    assert found.output_tokens.mean == 2.5
    assert (found.output_tokens.p50, found.output_tokens.p90, found.output_tokens.max) == (2, 4, 4)


def test_a_partial_last_block_counts_the_tokens_it_has() -> None:
    same = TraceRequest("a", 0.0, 700, 1, blocks=(0, 1))
    assert describe([same, same]).ideal_hit_ratio == 0.5


def test_one_request_or_one_instant_has_no_rate() -> None:
    for requests in ([lengths_only(5.0)], [lengths_only(5.0)] * 3):
        found = describe(requests)
        assert (found.duration_s, found.rate_per_s, found.interarrival_cv) == (0.0, None, None)


def test_a_peak_is_never_below_the_mean() -> None:
    """1.85 requests a second in 60 s, and 1.97 in the mean of 65 s."""
    times = [i / 1.97 for i in range(128)]
    found = describe(map(lengths_only, times))
    assert found.rate_per_s is not None
    assert found.peak_rate_60s == found.rate_per_s > 1.95
    short = describe(map(lengths_only, times[:2]))
    assert (short.peak_rate_1s, short.peak_rate_60s) == (None, None)


def test_nothing_to_describe_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no requests"):
        describe([])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_quantiles_are_nearest_ranks(tokens: list[int]) -> None:
    found = describe(lengths_only(0.0, token) for token in tokens).input_tokens
    ordered = sorted(tokens)
    for share, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value == ordered[-(-share * len(tokens) // 100) - 1]
    assert found.max == ordered[-1]
    assert found.mean == pytest.approx(fmean(tokens))


@given(st.lists(st.floats(0, 900), min_size=1, max_size=80))
def test_windows_agree_with_counting_them_all(times: list[float]) -> None:
    times.sort()
    found = describe(map(lengths_only, times))
    since = [time - times[0] for time in times]
    full = int(since[-1] // 60)
    placed = Counter(int(time // 60) for time in since)
    counts = [placed[window] for window in range(full + 1)]
    if since[-1] >= 60:
        assert found.peak_rate_60s == pytest.approx(max(max(counts) / 60, len(times) / since[-1]))
    counts = counts[:-1]  # the last window is not full
    if full >= 2 and any(counts):
        assert found.dispersion_60s == pytest.approx(pvariance(counts) / fmean(counts), abs=1e-9)
    else:
        assert found.dispersion_60s is None


# Few ids, so that prompts often share; the same id may follow different ones.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@given(st.lists(prompts, min_size=1, max_size=12))
def test_the_ideal_cache_agrees_with_comparing_every_prompt_with_every_earlier_one(
    trace: list[tuple[int, ...]],
) -> None:
    cache = IdealCache()
    for number, blocks in enumerate(trace):
        longest = max((common_length(blocks, earlier) for earlier in trace[:number]), default=0)
        request = TraceRequest("a", 0, 16 * len(blocks), 1, blocks, 16)
        found = cache.look_up(request)
        assert (found.hit_blocks, found.hit_tokens) == (longest, 16 * longest)
        assert cache.root_blocks == min(
            common_length(trace[0], request) for request in trace[: number + 1]
        )


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from("ab"), max_size=4), min_size=1, max_size=8))
def test_text_is_compared_by_64_bytes(trace: list[list[str]]) -> None:
    cache = IdealCache()
    for number, parts in enumerate(trace):
        longest = max((common_length(parts, earlier) for earlier in trace[:number]), default=0)
        text = "".join(part * 64 for part in parts) + "tail"
        found = cache.look_up(TraceRequest("a", 0, len(text) // 4, 1, text=text))
        assert found.hit_blocks == longest
        assert found.hit_tokens == pytest.approx(16 * longest)


def test_poisson_arrivals_look_like_poisson() -> None:
    dice = Random(1)
    time_s = 0.0
    times = [time_s := time_s + dice.expovariate(5) for _ in range(30_000)]
    found = describe(map(lengths_only, times))
    assert found.rate_per_s == pytest.approx(5, rel=0.02)
    assert found.interarrival_cv == pytest.approx(1, abs=0.02)
    assert found.dispersion_60s == pytest.approx(1, abs=0.35)


@needs_data
def test_the_mooncake_synthetic_head() -> None:
    found = describe(open_trace(TRACES / "mooncake_synthetic_head.jsonl"))
    assert found.requests == 1_920
    assert found.ideal_hit_ratio == pytest.approx(0.32, abs=0.01)


# Published files that are whole in ../shared/data, and what facts_traces.md measured on them:
# requests, mean and p50, p90, p99 and maximum of input and of output.
MEASURED = {
    "AzureLLMInferenceTrace_code.csv": (
        8_819, (2_048, 1_469, 5_187, 7_436, 7_437), (28, 13, 55, 251, 1_899),
    ),
    "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv": (
        28_257, (2_588, 2_730, 3_702, 3_933, 4_054), (291, 167, 372, 3_271, 4_056),
    ),
}  # fmt: skip


@needs_data
@pytest.mark.parametrize("name", MEASURED)
def test_published_files_are_described_as_they_were_measured(name: str) -> None:
    """Quantiles may differ by one rank: 0.5 %, or one token."""
    requests, inputs, outputs = MEASURED[name]
    found = describe(open_trace(TRACES / name))
    assert found.requests == requests
    for measured, one in ((inputs, found.input_tokens), (outputs, found.output_tokens)):
        shown = (round(one.mean), one.p50, one.p90, one.p99, one.max)
        assert shown == pytest.approx(measured, rel=5e-3, abs=1)
    if name.startswith("Azure"):
        assert found.duration_s == pytest.approx(3_436, abs=0.5)
        assert found.interarrival_cv == pytest.approx(13.15, abs=5e-3)
        assert (found.peak_rate_1s, round(found.peak_rate_60s or 0, 2)) == (67, 10.53)
        assert found.dispersion_60s == pytest.approx(164, rel=5e-3)
        assert found.ideal_hit_ratio == 0.0


def test_a_ramp_is_not_steady_and_the_tenths_say_where() -> None:
    """As the head of BurstGPT: the rate grows 90-fold."""
    times, now = [], 0.0
    while now < 10_000:
        times.append(now)
        now += 1 / (0.05 * 90 ** (now / 10_000))
    found = describe(lengths_only(time) for time in times)
    assert found.steady is False
    assert found.slowest_tenth is not None
    assert found.fastest_tenth is not None
    assert (found.slowest_tenth.from_s, found.slowest_tenth.to_s) == pytest.approx(
        (0.0, 1000.0), rel=1e-3
    )
    assert found.fastest_tenth.from_s == pytest.approx(9000, rel=1e-3)
    assert found.slowest_tenth.rate_per_s == pytest.approx(0.063, rel=0.1)
    assert found.fastest_tenth.rate_per_s == pytest.approx(3.6, rel=0.1)


def test_poisson_arrivals_are_steady_and_few_requests_tell_nothing() -> None:
    dice = Random(1)
    now, times = 0.0, []
    for _ in range(500):
        now += dice.expovariate(3.0)
        times.append(now)
    assert describe(lengths_only(time) for time in times).steady is True
    assert describe(lengths_only(time) for time in times[:499]).steady is None


@needs_data
def test_published_traces_say_where_their_rate_changes() -> None:
    code = describe(open_trace(TRACES / "AzureLLMInferenceTrace_code.csv"))
    assert code.steady is False
    assert code.slowest_tenth is not None
    assert code.slowest_tenth.from_s == pytest.approx(2749, abs=1)  # minutes 45 to 50 have 0.11/s
    chat = describe(open_trace(TRACES / "mooncake_conversation_head.jsonl"))
    assert chat.steady is True
