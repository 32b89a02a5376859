"""The shaper loses no request, sends none twice, rejects none early and keeps none too long."""

from math import inf

import pytest
from hypothesis import settings
from shaper_machine import ShaperMachine

pytestmark = pytest.mark.timeout(400)  # a failure takes minutes to shrink
TestShaper = ShaperMachine.TestCase
TestShaper.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("tokens", "timeout_s"), [(500, inf), (40_000, inf), (40_000, 25.0)])
def test_a_waiting_request_is_rejected_when_its_patience_ends(
    tokens: int, timeout_s: float
) -> None:
    """Requests come one after another; the machine checks when each is rejected."""
    machine = ShaperMachine()
    machine.start(
        slots=[1], kv_tokens=inf, prefills=inf, max_queue=5, route="warm_or_least_work",
        tenants=("",), chunks=[inf],
    )  # fmt: skip
    machine.arrive(500, None, inf, True, 0, "standard")  # takes the only slot and keeps it
    for _ in range(5):
        machine.arrive(tokens, None, timeout_s, True, 0, "standard")
        machine.time_passes(0.1)
    assert machine.waiting
    machine.time_passes(35.0)
    assert not machine.waiting
    machine.teardown()
