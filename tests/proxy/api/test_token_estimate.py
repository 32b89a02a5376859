"""An estimate of tokens rejects no prompt that an engine may take, whatever it was taught."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from body_reading import read_body
from hypothesis import given
from hypothesis import strategies as st
from stages.proxy_stage import Call, answer, on_stage

from forebay.proxy.api.dialects import CHAT, COMPLETIONS
from forebay.proxy.api.token_estimate import MOST, TokenEstimate

CONTEXT = 131_072  # tokens; `up_to` of the last bucket by default
TEMPLATE = 40  # tokens that an engine adds to every prompt
# Bytes per token, as cl100k counts them.
KINDS = {"english": 4.45, "chinese": 2.52, "code": 4.41, "base64": 1.39, "tables": 14.8}
SHARES = (0.05, 0.25, 0.5, 0.9, 1.0)  # of the context

Training = list[tuple[int, float]]  # bytes, and bytes per token
TRAININGS: dict[str, Training] = {
    "fresh": [],
    "short chats": [(300, 4.4)] * 300,
    "short and dense": [(300, 1.0)] * 60,
    "dense documents": [(500_000, 1.0)] * 60,
    "blanks": [(500_000, 16.0)] * 60,
    "nothing but a template": [(1, 4.0)] * 200,
}


def counted(size: int, ratio: float) -> int:
    """What the engine counts."""
    return TEMPLATE + round(size / ratio)


def taught(training: Training, tenant: str = "") -> TokenEstimate:
    estimate = TokenEstimate(4.0)
    for size, ratio in training:
        estimate.learn(size, counted(size, ratio), tenant)
    return estimate


def estimated(
    estimate: TokenEstimate, fields: dict[str, Any], chat: bool = True, most: int = CONTEXT
) -> int:
    dialect = CHAT if chat else COMPLETIONS
    return read_body(fields, dialect, estimate=estimate, most_tokens=most).request.prompt_tokens


def document(size: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x" * (size - 6)}]}


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_fits_the_context_fits_a_bucket(kind: str, training: str) -> None:
    estimate = taught(TRAININGS[training])
    for share in SHARES:
        size = int((share * CONTEXT - TEMPLATE) * KINDS[kind])
        assert estimated(estimate, document(size)) <= CONTEXT


@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 20)), max_size=30),
    st.integers(100, 1000 * MOST),
)
def test_no_training_makes_a_text_too_long(usages: list[tuple[int, int]], size: int) -> None:
    estimate = TokenEstimate(4.0)
    for prompt_bytes, tokens in usages:
        estimate.learn(prompt_bytes, tokens)
    assert estimated(estimate, {"prompt": "x" * size}, chat=False, most=1000) <= 1000


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"prompt": "x" * (CONTEXT * MOST + MOST)}, False),  # one token too many at any ratio
        ({"prompt": [1] * (CONTEXT + 1)}, False),  # token ids are counted exactly
        ({"prompt": ["x" * 40_000] * 20}, False),  # the sum of a batch is work
        (document(CONTEXT * MOST + MOST), True),
    ],
)
def test_a_prompt_that_cannot_fit_stays_too_long(fields: dict[str, Any], chat: bool) -> None:
    assert estimated(TokenEstimate(4.0), fields, chat) > CONTEXT


@pytest.mark.parametrize(
    "fields",
    [
        # Gemma 3 makes 256 tokens of an image, the estimate is 1,024.
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}] * 200}]},
        {**document(3_000_000), "truncate_prompt_tokens": -1},
    ],
)
def test_media_and_prompts_that_the_engine_cuts_may_fit(fields: dict[str, Any]) -> None:
    assert estimated(TokenEstimate(4.0), fields) == CONTEXT


@pytest.mark.parametrize("template", [0, 20, 60, 200])
def test_short_chats_teach_the_template_and_not_the_ratio(template: int) -> None:
    estimate = TokenEstimate(4.0)
    for _ in range(300):
        estimate.learn(300, 75 + template)
    assert estimate.tokens(300) == pytest.approx(75 + template, abs=1)
    assert estimate.tokens(480_000) == pytest.approx(120_000, rel=0.01)


def test_a_prompt_counts_by_its_bytes() -> None:
    many_chats, one_document = TokenEstimate(4.0), TokenEstimate(4.0)
    for _ in range(10):
        many_chats.learn(2_000, 1_000)
    one_document.learn(40_000, 20_000)
    assert many_chats.tokens(10_000) < one_document.tokens(10_000)


def test_a_tenant_teaches_its_own_estimate_only() -> None:
    estimate = taught([(500_000, 1.0)] * 60 + [(300, 1.0)] * 60, "bad")
    estimate.learn(4_000, 1_000, "good")
    for tenant in ("good", "new"):
        assert estimate.tokens(200_000, tenant) == pytest.approx(50_000, rel=0.01)


def engine(ratio: Callable[[], float]) -> Any:
    async def serve(call: Call) -> None:
        usage = {"prompt_tokens": counted(len(call.body), ratio()), "completion_tokens": 1}
        choice = {"index": 0, "text": "yes", "finish_reason": "length"}
        await call.send(answer(200, json.dumps({"choices": [choice], "usage": usage}).encode()))

    return serve


async def test_documents_reach_the_engine_after_short_dense_requests_of_a_stranger() -> None:
    """Sixty requests of 300 bytes made every document of 50,000 tokens a 400."""
    ratio = 1.0

    async with on_stage(engine(lambda: ratio)) as (on, _):
        for _ in range(60):
            assert await on.status({"prompt": "x" * 300, "max_tokens": 1}) == 200
        ratio = 4.45
        for tokens in (50_000, 100_000, 130_000):
            assert await on.status({"prompt": "y" * int(tokens * ratio), "max_tokens": 1}) == 200
