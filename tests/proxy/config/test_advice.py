"""What a proxy says at its start: what cannot work, and where short prompts wait for long ones."""

from pathlib import Path
from typing import Any

import pytest

from forebay.proxy.cli import main
from forebay.proxy.config.advice import advise
from forebay.proxy.config.contradictions import contradictions
from forebay.proxy.config.schema import Config
from forebay.proxy.log_events import LogEvent

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
    bounded = {"url": "http://h:4", "scheduler": "forebay"}
    lines = advised(backends=[{"url": "http://h:1"}, chunked, {"url": "http://h:3"}, bounded])
    assert list(lines) == ["gpu0", "gpu2"]
    assert lines["gpu0"] == (
        "gpu0: long prompts are computed whole, so every chat behind one waits for it (9 s behind "
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


ACME = {"known": {"acne": {"weight": 2}}}


@pytest.mark.parametrize(
    ("keys", "tenants", "text", "remedy"),
    [
        ({"tenants": ACME}, ["acme"], "tenants.known: acne has no key", "did you mean acme?"),
        ({"tenants": ACME}, [], "tenants.known: without keys nobody is", "set tenants.keys"),
        ({"models": {"gpt-4o": "lama-3-8b"}}, [], "models: gpt-4o stands for lama-3-8b, which no",
         "correct the name: did you mean llama-3-8b?"),
        ({"limits": {"body": "1KiB"}}, [], "limits.body: 1KiB holds no prompt of 131,072 tokens",
         "raise limits.body to 512KiB"),
        ({"timeouts": {"first_token": "1ms"}}, [], "timeouts.first_token: 1ms ends nearly every",
         "give at least 1s"),
        ({"buckets": [{"name": "a", "up_to": 9, "target": "60m"}]}, [],
         "buckets.a: no request waits for its target of 3600s, as max_wait is 30s",
         "raise max_wait to 3600s, or lower target"),
        ({"mode": "observe", "hold": {"max_requests": 9}}, [], "hold: mode observe sends each",
         "leave hold out"),
    ],
)  # fmt: skip
def test_a_contradiction_has_a_line(
    keys: dict[str, Any], tenants: list[str], text: str, remedy: str
) -> None:
    backends = [{"url": "http://h:1", "models": ["llama-3-8b"]}]
    ((found, what_to_do),) = contradictions(
        Config.model_validate({"backends": backends, **keys}), tenants
    )
    assert found.startswith(text)
    assert remedy in what_to_do


def test_a_sound_configuration_has_no_line() -> None:
    def found(holders: list[str] | None, *backends: dict[str, Any], **keys: Any) -> list[Any]:
        given = Config.model_validate({"backends": backends, **keys})
        return list(contradictions(given, holders))

    assert found([], {"url": "http://h:1"}) == []
    assert found(None, {"url": "http://h:1"}, tenants=ACME) == []  # any tenant may come
    asked = {"url": "http://h:2"}  # it may serve that model
    named = {"url": "http://h:1", "models": ["a"]}
    assert found([], named, asked, models={"gpt": "b"}) == []
    assert found(["acne"], named, tenants=ACME, models={"gpt": "a"}) == []


def test_the_check_of_a_file_warns_of_what_cannot_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text("backends: [{url: 'http://h:1'}]\ntenants: {known: {acme: {weight: 2}}}\n")
    assert main(["proxy", "--config", str(path), "--check-config"]) == 0
    said = capsys.readouterr().err
    assert "warning: tenants.known: without keys nobody is a tenant" in said
    assert "the configuration is valid" in said
