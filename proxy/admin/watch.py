"""Look at the proxy as `forebay doctor` does, twice a minute, and report findings.

The checks of `diagnose/checks.py` run over the last minute. A finding that begins or ends is a line
of the log and an event of the live page. `/status` and `/requests` list the findings, so the page
and `forebay explain` show the cause first.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forebay.proxy.admin.backend_facts import backend_facts
from forebay.proxy.admin.request_list import ended_within, outcomes
from forebay.proxy.admin.status import status_fields
from forebay.proxy.app import App
from forebay.proxy.backends.link import BackendLink
from forebay.proxy.diagnose.checks import EFFECTS, examine, place_of
from forebay.proxy.diagnose.doctor.finding import FEW, Finding
from forebay.proxy.diagnose.scene import MetricSample, Scene
from forebay.proxy.log_events import LogEvent
from forebay.proxy.reload import Reloader
from forebay.proxy.services import Services
from forebay.traces.ground.command_line.messages import all_printable

EVERY_S = 30.0
WINDOW = 2  # looks: the findings are about the last minute
OVER_S = 120.0  # without the finding: then it is over
RECENT_S = 300.0  # `explain` lists the findings of this time
MOST_ASKED = 16  # backends in one look; a large fleet is asked in turn
STANDING = frozenset({"long prompts"})
"""Checks of the configuration, whose findings are in the log of the start."""
LOGGED_ELSEWHERE = STANDING | {"backends take work", "rejections", "reloads"}
"""Checks whose faults have log lines of their own."""


@dataclass(slots=True)
class SeenCheck:
    """A check with findings, as the latest look found them. `logged`: the log names them."""

    findings: list[Finding]
    began_at: float
    last_at: float
    logged: bool = False


class Watch:
    """Runs the checks, and keeps their findings."""

    def __init__(self, services: Services, *, app: App, reloader: Reloader) -> None:
        self._services = services
        self._app = app
        self._reloader = reloader
        self._clock = services.driver.clock
        self._looks: deque[list[MetricSample]] = deque([[]], maxlen=WINDOW)
        self._started_at = self._clock()
        self._seen: dict[str, SeenCheck] = {}
        self._asked = 0  # number of the backend that is asked next
        self._failed = False

    def status(self) -> dict[str, Any]:
        """Return the JSON of `/status`, with the findings of the last look."""
        fields = self._status()
        fields["findings"] = self.findings(EVERY_S)
        return fields

    def findings(self, seconds: float) -> list[dict[str, Any]]:
        """Return the findings of the last `seconds`, causes first, as JSON."""
        now = self._clock()
        rows = [
            {**asdict(f), "since_s": round(now - seen.began_at, 1),
             "age_s": round(now - seen.last_at, 1)}
            for seen in self._seen.values()
            if now - seen.last_at <= seconds
            for f in seen.findings
        ]  # fmt: skip
        return in_order(rows)

    async def look(self) -> None:
        """Run the checks, and log each finding that begins or ends."""
        scene = await self._scene()
        now = self._clock()
        by_check: dict[str, list[Finding]] = {}
        for finding in printable_findings(f for f in examine(scene) if f.severity != "info"):
            by_check.setdefault(finding.check, []).append(finding)
        for check, findings in by_check.items():
            seen = self._seen.setdefault(check, SeenCheck(findings, now, now))
            if now - seen.last_at >= OVER_S:
                seen.began_at = now
            seen.findings, seen.last_at = findings, now
        self._log(by_check, now)

    def _log(self, by_check: dict[str, list[Finding]], now: float) -> None:
        say = self._services.events
        causes = [c for c in by_check if c not in EFFECTS | STANDING]
        for check in causes or by_check:
            seen = self._seen[check]
            if seen.logged or check in LOGGED_ELSEWHERE:
                continue
            seen.logged = True
            for finding in seen.findings:
                say(LogEvent.FINDING, f"{finding.text}. Remedy: {finding.remedy}", "", check)
        for check, seen in list(self._seen.items()):
            if now - seen.last_at < OVER_S:
                continue
            if seen.logged:
                seen.logged = False
                lasted_s = seen.last_at - seen.began_at
                text = f"no longer found after {lasted_s:.0f} s: {seen.findings[0].text}"
                say(LogEvent.FINDING_OVER, text, "", check)
            if now - seen.last_at >= RECENT_S:
                del self._seen[check]

    async def _scene(self) -> Scene:
        samples = [
            MetricSample(sample.name, sample.labels, sample.value)
            for family in self._services.metrics.registry.collect()
            for sample in family.samples
        ]
        then = self._looks[0]
        self._looks.append(samples)
        before = self._status()
        ended = ended_within(self._services.receipts, WINDOW * EVERY_S, self._clock())
        scene = Scene(before, [], samples, before, then, outcomes=outcomes(ended)).recent()
        # An idle proxy does not ask its backends: their answers explain the traffic.
        if scene.total("forebay_responses_total") < FEW:
            return scene
        backends = self._services.backends
        facts = await backend_facts(backends, self._next_few(list(backends.links.values())))
        return replace(scene, status=self._status(), facts=facts, life=samples, _indexes={})

    def _next_few(self, links: list[BackendLink]) -> list[BackendLink]:
        """Return the backends whose turn it is to be asked."""
        first = self._asked % max(1, len(links))
        few = (links[first:] + links[:first])[:MOST_ASKED]
        self._asked = first + len(few)
        return few

    def _status(self) -> dict[str, Any]:
        return status_fields(
            self._services, self._app, self._reloader, uptime_s=self._clock() - self._started_at
        )

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look()
            except Exception as error:  # our own fault must not end the checks
                if not self._failed:
                    self._failed = True
                    text = f"checks: internal error: {type(error).__name__}"
                    self._services.events(LogEvent.INTERNAL_ERROR, text)


def printable_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings without control characters: servers choose versions and models."""
    return [
        Finding(f.check, f.severity, all_printable(f.text), all_printable(f.remedy))
        for f in findings
    ]


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return findings in the order of `forebay doctor`."""
    return sorted(rows, key=lambda row: place_of(row["check"], row["severity"]))


def of_all_workers(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the findings of several workers, each check from the worker that found most."""
    best: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        for check in {row["check"] for row in part}:
            rows = [row for row in part if row["check"] == check]
            if len(rows) > len(best.get(check, ())):
                best[check] = rows
    return in_order(row for rows in best.values() for row in rows)
