"""A request is sent only to backends that serve its model, in a large fleet too."""

import pytest

from forebay.proxy.core.model import BackendSpec, Bucket, Reject, Request, Send
from forebay.proxy.core.shaper import Shaper

BUCKETS = [Bucket("chat", 5_000, 100, 2.0), Bucket("document", 131_072, 100, 30.0)]


def fleet(count: int) -> Shaper:
    """Every third backend serves `rare`, the others `common`."""
    names = [f"b{i}" for i in range(count)]
    shaper = Shaper([BackendSpec(name, 4) for name in names], BUCKETS)
    for i, name in enumerate(names):
        shaper.backend_up(name, 0.0)
        shaper.changes.set_models(name, frozenset(["common" if i % 3 else "rare"]), 0.0)
    return shaper


@pytest.mark.parametrize("count", [3, 40])
def test_each_goes_to_its_model(count: int) -> None:
    shaper, blocks = fleet(count), tuple(range(4))
    served = []
    for i in range(3 * count):
        model = ("common", "rare", "")[i % 3]
        request = Request(str(i), 2_000, 100, blocks, 500.0, model=model)
        for action in shaper.arrive(request, i / 100):
            if isinstance(action, Send):
                backend = shaper.backends[action.backend]
                served.append(
                    backend.models == frozenset([action.request.model]) or not action.request.model
                )
    assert len(served) >= count
    assert all(served)


@pytest.mark.parametrize("count", [3, 40])
def test_nobody_is_left_who_serves_it(count: int) -> None:
    shaper = fleet(count)
    for name, backend in shaper.backends.items():
        if backend.models == frozenset(["rare"]):
            shaper.backend_down(name, 1.0)
    (action,) = shaper.arrive(Request("r", 2_000, model="rare"), 2.0)
    assert isinstance(action, Reject)
    assert action.reason == "no_backend_available"
    (action,) = shaper.arrive(Request("s", 2_000, model="common"), 2.0)
    assert isinstance(action, Send)
