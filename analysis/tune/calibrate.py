"""Fit the twin's step times to the observed times."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from forebay.replay.sim.scenario import Scenario
from forebay.replay.validation.fit_run import fit_run
from forebay.replay.validation.measured import Timed
from forebay.replay.validation.proxy_log import timed_rows
from forebay.traces.ground.schema import TraceRequest

MOST_FITTED = 300
"""Requests of one server. More do not tell the constants apart any better, and take longer."""
FEWEST_FITTED = 30


def calibrated(
    scenario: Scenario, rows: Sequence[TraceRequest], most: int = MOST_FITTED
) -> Scenario | None:
    """Return the scenario with constants fitted to `most` observed times of one server.

    None if too few times are known, or if the fit is no physics.
    """
    measured = _of_one_server(rows)[:most]
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


def _of_one_server(rows: Sequence[TraceRequest]) -> list[Timed]:
    """Return the first requests of the server with most prompt tokens, in order of sending.

    Short prompts alone do not tell what long ones cost.
    """
    by_server = defaultdict[str, list[Timed]](list)
    for timed in timed_rows(rows):
        by_server[timed.backend].append(timed)
    most = max(
        by_server.values(),
        key=lambda sent: sum(timed.row.input_tokens for timed in sent),
        default=[],
    )
    return most[:MOST_FITTED]
