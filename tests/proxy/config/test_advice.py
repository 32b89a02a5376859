"""What a proxy says at its start about backends on which short prompts wait for long ones."""

from typing import Any

import pytest

from forebay.proxy.config.advice import advise
from forebay.proxy.config.schema import Config
from forebay.proxy.telemetry.log_events import LogEvent

CHAT = {"name": "chat", "up_to": 5_000, "max_wait": 2.0}
DOCUMENT = {"name": "document", "up_to": 131_072, "max_wait": 30.0}


def advised(**keys: Any) -> dict[str, str]:
    """The lines of a configuration, by backend."""
    lines: dict[str, str] = {}

    def say(event: LogEvent, message: str, backend: str = "", reason: str = "", /) -> None:
        assert event is LogEvent.LONG_PROMPTS_BLOCK
        lines[backend] = message

    advise(Config.model_validate(keys), say)
    return lines


def test_each_backend_without_the_flag_has_a_line() -> None:
    chunked = {"url": "http://h:2", "long_prefill_token_threshold": 512}
    lines = advised(backends=[{"url": "http://h:1"}, chunked, {"url": "http://h:3"}])
    assert list(lines) == ["gpu0", "gpu2"]
    assert lines["gpu0"] == (
        "gpu0: long prompts are computed whole, so every chat behind one waits for it (8 s behind "
        "120,000 tokens of an 8B model on an H200): start vLLM with "
        "--long-prefill-token-threshold 2048 and set long_prefill_token_threshold: 2048"
    )


@pytest.mark.parametrize(
    ("buckets", "named"),
    [
        ([CHAT, DOCUMENT], ["gpu0", "gpu1"]),
        ([CHAT], []),
        ([DOCUMENT], []),
        ([CHAT, {**DOCUMENT, "up_to": 8_192}], []),  # one engine step
        ([CHAT, {**DOCUMENT, "max_wait": 2.0}], []),  # nobody is in a greater hurry
        ([CHAT, {**DOCUMENT, "backends": ["gpu1"]}], ["gpu1"]),
        ([{**CHAT, "backends": ["gpu0"]}, {**DOCUMENT, "backends": ["gpu1"]}], []),
    ],
)
def test_only_where_a_long_prompt_can_block_others(
    buckets: list[dict[str, Any]], named: list[str]
) -> None:
    backends = [{"url": "http://h:1"}, {"url": "http://h:2"}]
    assert list(advised(backends=backends, buckets=buckets)) == named
