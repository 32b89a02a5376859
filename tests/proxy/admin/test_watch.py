"""The checks that the proxy runs itself: what is logged, listed and put together."""

import asyncio
import json
from typing import Any

import pytest
from stages.proxy_stage import Stage, on_stage

from forebay.proxy.admin import watch
from forebay.proxy.admin.request_list import outcomes_of_all
from forebay.proxy.admin.watch import EVERY_S, OVER_S, RECENT_S, of_all_workers
from forebay.proxy.diagnose.doctor.finding import Finding
from forebay.proxy.log_events import LogEvent

CAUSE = Finding("prefix caching", "warning", "gpu\x1b0 runs without it", "switch it on")
EFFECT = Finding("late first tokens", "warning", "9 of 20 were late", "read explain")
STANDING = Finding("long prompts", "warning", "a: long prompts are computed whole", "set the flag")
KNOWN = Finding("mode", "info", "the proxy only observes", "set mode")


def findings_of(on: Stage) -> list[tuple[LogEvent, str]]:
    kinds = LogEvent.FINDING, LogEvent.FINDING_OVER
    events = zip(on.said, on.said.events, strict=True)
    return [(event, line) for line, (event, _, _) in events if event in kinds]


async def checks_of(on: Stage, target: str) -> list[str]:
    async with on.client.get(on.proxy.admin_url + target) as response:
        return [row["check"] for row in json.loads(await response.text())["findings"]]


async def test_a_cause_has_a_line_at_its_begin_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Finding] = []
    monkeypatch.setattr(watch, "examine", lambda _: list(found))

    async with on_stage(None) as (on, _):
        found[:] = [KNOWN, STANDING, EFFECT, CAUSE]
        await asyncio.sleep(2 * EVERY_S + 1.0)
        begin = (
            LogEvent.FINDING,
            "gpu\N{REPLACEMENT CHARACTER}0 runs without it. Remedy: switch it on",
        )
        assert findings_of(on) == [begin]  # once, and neither the effect nor the standing one
        assert await checks_of(on, "/status") == [
            "prefix caching",
            "long prompts",
            "late first tokens",
        ]
        found.clear()
        await asyncio.sleep(EVERY_S)
        assert await checks_of(on, "/status") == []
        assert "prefix caching" in await checks_of(on, "/requests?by=slowest")
        assert await checks_of(on, "/requests?by=slowest&since_s=20") == []  # one window for all
        await asyncio.sleep(OVER_S)
        assert [event for event, _ in findings_of(on)] == [begin[0], LogEvent.FINDING_OVER]
        assert "no longer found after 30 s: gpu" in findings_of(on)[1][1]
        await asyncio.sleep(RECENT_S)
        assert await checks_of(on, "/requests?by=slowest") == []
        # An effect without a cause is logged itself.
        found[:] = [STANDING, EFFECT]
        await asyncio.sleep(EVERY_S)
        assert findings_of(on)[-1] == (LogEvent.FINDING, "9 of 20 were late. Remedy: read explain")


async def test_an_idle_proxy_asks_its_backends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(watch, "backend_facts", asked.append)

    async with on_stage(None) as (_, _):
        await asyncio.sleep(3 * EVERY_S)
    assert not asked


async def test_a_check_that_fails_is_logged_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Finding] | None = None

    def examine(_: object) -> list[Finding]:
        if found is None:
            raise KeyError("a fault of ours")
        return found

    monkeypatch.setattr(watch, "examine", examine)

    async with on_stage(None) as (on, _):
        await asyncio.sleep(3 * EVERY_S)
        assert [line for line in on.said if "internal error" in line] == [
            "checks: internal error: KeyError"
        ]
        found = [CAUSE]
        await asyncio.sleep(EVERY_S)
        assert await checks_of(on, "/status") == ["prefix caching"]


async def test_a_large_fleet_is_asked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def facts(_: object, links: list[Any]) -> list[dict[str, Any]]:
        asked.extend(link.name for link in links)
        return []

    monkeypatch.setattr(watch, "backend_facts", facts)
    monkeypatch.setattr(watch, "FEW", 0)
    monkeypatch.setattr(watch, "MOST_ASKED", 2)

    async with on_stage(None, None, None) as (on, _):
        await asyncio.sleep(3 * EVERY_S + 1.0)
        assert sorted(asked) == sorted(2 * list(on.proxy.backends.links))


def test_outcomes_of_workers_are_added_up() -> None:
    def part(count: int) -> dict[str, Any]:
        return {"tenants": {"acme": {"requests": count, "left_after_s": [0.5] * count}},
                "errors": [["acme", "m", 404, count], ["acme", f"m{count}", 400, 1]],
                "backends": {"b0": {"slowness": [1.0], "ended_after_s": []}}}  # fmt: skip

    assert outcomes_of_all([part(2), part(3)]) == {
        "tenants": {"acme": {"requests": 5, "left_after_s": [0.5] * 5}},
        "errors": [["acme", "m", 404, 5], ["acme", "m2", 400, 1], ["acme", "m3", 400, 1]],
        "backends": {"b0": {"slowness": [1.0, 1.0], "ended_after_s": []}},
    }


def test_findings_of_workers_are_listed_once() -> None:
    def row(check: str, text: str, severity: str = "warning") -> dict[str, Any]:
        return {"check": check, "text": text, "severity": severity}

    first = [row("prefix caching", "a"), row("late first tokens", "3 of 20")]
    second = [row("prefix caching", "a"), row("prefix caching", "b"), row("restarts", "c", "error")]
    together = of_all_workers([first, second])
    assert [finding["text"] for finding in together] == ["c", "a", "b", "3 of 20"]
