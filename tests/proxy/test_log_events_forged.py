"""A name that a server or a client chose forges no log line and steers no terminal."""

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from stages.proxy_stage import RawBackend, stage

from forebay.proxy.cli import main
from forebay.proxy.config.sections import Logs
from forebay.proxy.diagnose import admin_client
from forebay.proxy.telemetry.logs.access_log import LOGGER, configure_logs, say
from forebay.traces.ground.command_line.messages import shortlist, talk

FORGED = "m\n2026-11-26T00:00:00Z CRITICAL fake\x1b[2J\x1b]0;pwn\x07\u2028\x9b\x7f\u202e"
UNSAFE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    handlers, level, propagate = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    yield
    LOGGER.handlers[:], LOGGER.propagate = handlers, propagate
    LOGGER.setLevel(level)


@pytest.mark.parametrize("format_", ["console", "json"])
async def test_a_name_of_a_model_stays_in_its_line(format_: str) -> None:
    out = io.StringIO()

    configure_logs(Logs(format=format_, level="debug"), out)
    one, two = RawBackend(), RawBackend()
    one.models = {FORGED: {}}
    two.models = {f"adapter-{number}": {} for number in range(4_000)}
    async with AsyncExitStack() as stack:
        urls = [(await stack.enter_async_context(b.running())).url for b in (one, two)]
        on = await stack.enter_async_context(stage(urls))
        for event, line in zip(on.said.events, on.said, strict=True):
            say(event[0], line, *event[1:])
        LOGGER.info("request", extra={"fields": {"tenant": FORGED}})
        async with on.client.get(on.proxy.admin_url + "/status") as response:
            text = await response.text()
        shown = json.loads(text)["backends"]
        assert [b["models_count"] for b in shown] == [1, 4_000]
        assert len(shown[1]["models"]) == 10
        assert len(text) < 8_000
    lines = out.getvalue().split("\n")
    assert not UNSAFE.search(out.getvalue())
    assert not [line for line in lines if line.startswith("2026-11-26T00:00:00Z CRITICAL")]
    (listed,) = (line for line in lines if "adapter-0," in line)
    assert "adapter-9 and 3,990 more" in listed
    assert max(map(len, lines)) < 1_000


def test_a_terminal_gets_no_name_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"ready": True, "verdict": FORGED, "backends": [{FORGED: [FORGED]}]}
    monkeypatch.setattr(admin_client, "ask", lambda *_: json.dumps(answer).encode())
    found: dict[str, Any] = admin_client.ask_json("http://x", "/status", "ready")
    assert not UNSAFE.search("".join([found["verdict"], *found["backends"][0]]))
    assert not UNSAFE.search(found["backends"][0][next(iter(found["backends"][0]))][0])
    talk(f"first\nsecond {FORGED}")
    assert main(["doctor", "--admin", f"http://{FORGED}"]) == 2
    assert not UNSAFE.search(capsys.readouterr().err)


def test_a_list_shows_ten_and_a_count() -> None:
    assert shortlist("abc") == "a, b, c"
    assert shortlist(map(str, range(12))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    assert len(shortlist(["x" * 10_000])) == 128


def test_other_texts_stay_as_they_are() -> None:
    out = io.StringIO()
    configure_logs(Logs(format="console"), out)
    LOGGER.log(logging.INFO, "Überlast: 3 % – 模型 é")
    assert out.getvalue().endswith("Überlast: 3 % – 模型 é\n")
