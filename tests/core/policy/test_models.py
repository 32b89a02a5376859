"""A request is sent only to backends that serve its model, in a large fleet too."""

import pytest

from forebay.proxy.core.model import Action, BackendSpec, Bucket, Reject, Request, Send
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


def two_models(slots: int, chats: Bucket) -> Shaper:
    """a0 and a1 serve model a, b0 serves b."""
    specs = [BackendSpec(name, slots) for name in ("a0", "a1", "b0")]
    shaper = Shaper(specs, [chats, BUCKETS[1]])
    for name in shaper.backends:
        shaper.backend_up(name, 0.0)
        shaper.changes.set_models(name, frozenset(name[0]), 0.0)
    return shaper


def chats(shaper: Shaper, model: str, count: int, begin: float) -> list[Action]:
    """One every tenth of a second, none of which ends."""
    return [
        action
        for i in range(count)
        for action in shaper.arrive(Request(f"{model}{i}", 500, model=model), begin + i / 10)
    ]


@pytest.mark.parametrize(("model", "sent"), [("b", 2), ("a", 1)])
def test_chats_of_one_model_keep_no_document_of_another_waiting(model: str, sent: int) -> None:
    """Where chats of its own model flow, one of two servers is kept clear."""
    shaper = two_models(9, BUCKETS[0])
    for action in chats(shaper, model, 3, 0.0):
        shaper.first_token(action.request.id, 0.3)
        shaper.finish(action.request.id, 0.3)
    documents = [Request(f"d{i}", 120_000, model="a") for i in range(2)]
    actions = [action for one in documents for action in shaper.arrive(one, 0.4)]
    assert len([action for action in actions if isinstance(action, Send)]) == sent


def test_a_queue_holds_requests_of_its_model() -> None:
    shaper = two_models(1, Bucket("chat", 5_000, max_queue=3, max_wait_s=60.0))
    full = [a for a in chats(shaper, "a", 9, 0.0) if isinstance(a, Reject)]
    assert [action.reason for action in full] == ["queue_full"] * 4  # 2 run, 3 wait
    assert shaper.queued("chat") == 3
    assert not [a for a in chats(shaper, "b", 4, 1.0) if isinstance(a, Reject)]  # 1 runs, 3 wait
    (action,) = shaper.arrive(Request("more", 500, model="b"), 2.0)
    assert isinstance(action, Reject)


def shared(models: dict[str, str], *buckets: Bucket, slots: int = 1) -> Shaper:
    """Servers of these models, a letter each."""
    shaper = Shaper([BackendSpec(name, slots) for name in models], buckets or BUCKETS)
    for name, served in models.items():
        shaper.backend_up(name, 0.0)
        shaper.changes.set_models(name, frozenset(served), 0.0)
    return shaper


def test_requests_for_a_model_of_one_server_fill_no_queue_of_another() -> None:
    """Model m is served by both, x by one: all that waits there is for x."""
    shaper = shared({"s0": "mx", "s1": "m"}, Bucket("chat", 5_000, 3, 60.0))
    chats(shaper, "x", 9, 0.0)
    assert shaper.queued("chat") == 3
    for i in range(4):  # 1 runs, 3 wait
        actions = shaper.arrive(Request(f"m{i}", 500), 1.0)
        assert not [action for action in actions if isinstance(action, Reject)]
    (action,) = shaper.arrive(Request("more", 500), 2.0)
    assert isinstance(action, Reject)


@pytest.mark.parametrize("second", ["d", "dl"])
def test_an_adapter_on_one_of_two_servers_takes_no_protection_from_chats(second: str) -> None:
    shaper = shared({"s0": "d", "s1": second}, slots=9)
    for i in range(3):
        for action in shaper.arrive(Request(f"c{i}", 500), i / 10):
            shaper.first_token(action.request.id, 0.3)
            shaper.finish(action.request.id, 0.3)
    documents = [Request(f"d{i}", 120_000) for i in range(2)]
    actions = [action for one in documents for action in shaper.arrive(one, 0.4)]
    assert len([action for action in actions if isinstance(action, Send)]) == 1


def test_requests_follow_their_model_to_another_server() -> None:
    shaper = shared({"s0": "a", "s1": "b"}, Bucket("chat", 5_000, 9, 60.0))
    for i in range(3):
        shaper.arrive(Request(f"r{i}", 500, model="a"), 0.0)
    shaper.arrive(Request("b", 500, model="b"), 0.0)
    assert shaper.queued("chat") == 2
    assert not shaper.changes.set_models("s1", frozenset("ab"), 1.0)
    assert not shaper.changes.set_models("s0", frozenset("b"), 1.0)
    assert not shaper.finish("r0", 2.0)
    sent = shaper.finish("b", 3.0) + shaper.finish("r1", 4.0)
    assert [action.backend for action in sent if isinstance(action, Send)] == ["s1", "s1"]


def test_clients_come_back_as_its_own_servers_get_free() -> None:
    """The only server of b does not become faster by those of a."""

    def hints_s(a_servers: int) -> list[float]:
        names = ["b0", *(f"a{i}" for i in range(a_servers))]
        shaper = Shaper([BackendSpec(name, 1) for name in names], BUCKETS)
        for name in names:
            shaper.backend_up(name, 0.0)
            shaper.changes.set_models(name, frozenset(name[0]), 0.0)
        found = [
            action
            for i in range(30)
            for action in shaper.arrive(Request(str(i), 100_000, model="b"), i / 10)
        ]
        return [action.retry_after_s for action in found if isinstance(action, Reject)]

    assert hints_s(7) == hints_s(0)


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
