"""Fit the twin's step times to the observed times."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from forebay.replay.sim.scenario import Scenario
from forebay.replay.validation.fit_run import fit_run
from forebay.replay.validation.measured import LEAST_DECODED, Timed
from forebay.traces.ground.schema import TraceRequest

MOST_FITTED = 300
"""Requests of one server. More do not tell the constants apart any better, and take longer."""
FEWEST_FITTED = 30


def calibrated(scenario: Scenario, rows: Sequence[TraceRequest]) -> Scenario | None:
    """Return the scenario with constants fitted to the observed times of one server.

    None if too few times are known, or if the fit is no physics.
    """
    measured = timed_rows(rows)
    if len(measured) < FEWEST_FITTED:
        return None
    engine = scenario.engine
    fit = fit_run(
        measured,
        engine,
        engine.step_constants(),
        used=f"{len(measured)} observed requests",
        today=datetime.now(UTC).date(),
    )
    if fit.refusal() is not None:
        return None
    return replace(scenario, engine=replace(engine, calibration=fit.fit.constants))


def timed_rows(rows: Sequence[TraceRequest]) -> tuple[Timed, ...]:
    """Return the first requests of the server with most prompt tokens, in order of sending.

    Short prompts alone do not tell what long ones cost.
    """
    by_server: dict[object, list[Timed]] = {}
    for row in rows:
        observed = row.observed or {}
        if "e2e_s" not in observed or "ttft_s" not in observed or "sent_s" not in observed:
            continue
        sent_s, ttft_s, e2e_s = (observed[name] for name in ("sent_s", "ttft_s", "e2e_s"))
        decoded = row.output_tokens >= LEAST_DECODED
        timed = Timed(
            row,
            row.arrival_s + sent_s,
            ttft_s - sent_s,
            e2e_s - sent_s,
            (e2e_s - ttft_s) / (row.output_tokens - 1) if decoded else None,
            observed.get("cached_tokens"),
            finished=row.status == 200 and ttft_s > sent_s,
        )
        by_server.setdefault(observed.get("backend"), []).append(timed)
    most = max(
        by_server.values(),
        key=lambda sent: sum(timed.row.input_tokens for timed in sent),
        default=[],
    )
    return tuple(sorted(most, key=lambda timed: timed.sent_s)[:MOST_FITTED])
