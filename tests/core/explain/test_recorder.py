"""A recorder changes no decision, and a shaper without a recorder keeps no records."""

from collections.abc import Iterable

import pytest
from decisions import Scramble

from forebay.proxy.core.model import BackendSpec
from forebay.proxy.core.shaper import Shaper

SECONDS = 40.0


class Unrecorded(Scramble):
    """The same random events without a recorder."""

    def new(self, specs: Iterable[BackendSpec]) -> Shaper:
        return Shaper(specs, self.buckets(), tenants=self.tenants if self.fair else ())


@pytest.mark.parametrize("seed", range(6))
def test_decisions_are_equal_without_a_recorder(seed: int) -> None:
    recorded, unrecorded = Scramble(seed), Unrecorded(seed)
    for run in (recorded, unrecorded):
        run.run(SECONDS)
    assert str(unrecorded.digest) == str(recorded.digest)
    receipts = unrecorded.shaper.recorder.receipts
    assert not receipts.under_way
    assert not receipts.ended
    assert not any(any(tally.refusals.values()) for tally in receipts.tallies.values())
    assert recorded.shaper.recorder.receipts.ended
