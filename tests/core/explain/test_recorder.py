"""A recorder changes no decision, and keeps no records while it is off."""

import pytest
from decisions import Scramble

from forebay.proxy.core.explain.recorder import DecisionRecorder


@pytest.mark.parametrize("seed", range(6))
def test_a_recorder_changes_no_decision(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Scramble(seed)
    recorded.run(40.0)
    monkeypatch.setattr("decisions.DecisionRecorder", lambda keep: DecisionRecorder(0, on=False))
    silent = Scramble(seed)
    silent.run(40.0)
    assert str(silent.digest) == str(recorded.digest)
    assert recorded.shaper.recorder.receipts.ended
    receipts = silent.shaper.recorder.receipts
    assert not any((receipts.under_way, receipts.ended, receipts.tallies))
