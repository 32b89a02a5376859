"""The live run beside the simulator: its figures, and prefixes in the proxy's blocks."""

from math import nan

import numpy as np
import pytest
from case_list import CASES
from case_traces import BLOCK
from live import row
from play import FOREBAY, figures, play
from prefix_blocks import play_in_blocks

SHORT = [(20.0, 16.0)]


def test_the_traces_own_blocks_change_nothing() -> None:
    case = CASES["b2b-saas"]
    own = figures(case, play_in_blocks(case, case.make(SHORT, 0), BLOCK))
    assert own == figures(case, play(case, FOREBAY, SHORT, 0))


def test_longer_blocks_hide_the_end_of_a_head_from_the_policy_alone() -> None:
    case = CASES["b2b-saas"]
    outcomes = play_in_blocks(case, case.make(SHORT, 0), 512)
    expected = {o.matched_tokens for o in outcomes}
    assert max(expected) <= 7_200
    assert 11 * 512 in expected
    assert 6_000 not in expected
    assert 6_000 in {o.cached_tokens for o in outcomes}


def test_rejected_and_failed_requests_are_not_in_time() -> None:
    rows = CASES["b2b-saas"].make([(1.0, 8.0)], 0)[:4]
    shown = row(
        rows,
        np.array([0.5, 15.5, nan, nan]),
        np.array([nan, nan, 0.2, nan]),
        np.array([6_000.0, 0.0, nan, nan]),
    )
    assert shown["in_time"] == shown["rejected"] == shown["rejected_late"] == 25
    assert (shown["requests"], shown["failed"]) == (4, 1)
    assert shown["hits"] == pytest.approx(6_000 / 14_400 * 100, rel=1e-3)
