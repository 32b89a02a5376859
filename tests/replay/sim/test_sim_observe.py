"""Mode observe forecasts what mode shape does with the same trace.

Within three points, and six for sessions above capacity: there the traffic keeps the caches of the
engines full, and answers take longer than they would if it were shaped.
"""

from dataclasses import replace

import pytest
from arena_workloads import at_load
from forecasts import play
from observe import MAKERS

from forebay.replay.engine.config import EngineConfig

CASES = [
    (name, load, chunk, points)
    for name, load, points in (
        ("documents", 0.8, 3),
        ("documents", 1.5, 3),
        ("sessions", 0.8, 3),
        ("sessions", 1.2, 6),
    )
    for chunk in (0, 2_048)
]


@pytest.mark.parametrize(("name", "load", "chunk", "points"), CASES)
def test_the_forecast_is_what_shaping_does(name: str, load: float, chunk: int, points: int) -> None:
    rows = at_load(MAKERS[name](0, 800), load)
    engine = replace(EngineConfig(), long_prefill_token_threshold=chunk)
    seen, forecast, _ = play(rows, engine, observe=True)
    shaped, _, _ = play(rows, engine, observe=False)
    assert forecast is not None
    assert seen.rejected == 0.0
    assert forecast.rejected == pytest.approx(shaped.rejected, abs=points / 100)
    assert forecast.attained == pytest.approx(shaped.attained, abs=points / 100)
