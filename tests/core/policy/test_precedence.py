"""Work that an engine does before and beside a request: turns, and chunks of documents."""

import random
from math import inf

import pytest

from forebay.proxy.core.model import CLASSES, BackendSpec, Bucket, Request, Tenant
from forebay.proxy.core.policy.order import first
from forebay.proxy.core.policy.precedence import Before, Precedence
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import QueuedRequest
from forebay.proxy.core.state.tenants import Fairness

CHUNK = 2_048
BUCKETS = {
    "chat": Bucket("chat", 5_000, max_queue=64, max_wait_s=2.0),
    "document": Bucket("document", 131_072, max_queue=64, max_wait_s=30.0),
}


def backend(chunk: float = inf) -> Backend:
    return Backend(BackendSpec("a", 64, chunk_tokens=chunk), BUCKETS.values())


def precedence(made: Backend, fair: Fairness | None = None) -> Precedence:
    return Precedence({"a": made}, BUCKETS, fair or Fairness())


def queue(
    made: Backend, bucket: str, arrived_at: float, work_s: float, order: int
) -> QueuedRequest:
    deadline = arrived_at + BUCKETS[bucket].max_wait_s
    waiting = QueuedRequest(Request(str(order), 100), bucket, arrived_at, deadline, order, work_s)
    made.enqueue(waiting)
    return waiting


class TestTurns:
    def test_documents_claim_their_part_once_one_has_waited_half_of_what_it_can(self) -> None:
        made = backend()
        document = queue(made, "document", 0.0, 1.0, 1)
        chats = [queue(made, "chat", 14.0, 0.1, order) for order in (2, 3)]
        for order in range(10, 60):  # 5 s of chats: more than enough is owed
            made.send(Request(f"s{order}", 4_000), "chat", 0, now=14.0)
        assert made.turns.buckets.due("document", 1.0)
        assert first(made, [document, *chats], 14.9) is chats[0]
        assert first(made, [document, *chats], 15.0) is document

    def test_the_longest_wait_has_precedence_not_the_next_in_line(self) -> None:
        made = backend()
        queue(made, "document", 0.0, 9.0, 1)
        short = queue(made, "document", 14.0, 0.5, 2)
        short.due = 16.5
        assert made.queues["document"].late_at() == 15.0
        assert made.queues["chat"].late_at() == inf

    def test_a_chat_reckons_with_it_only_if_it_comes_to_that(self) -> None:
        made = backend()
        queue(made, "document", 0.0, 60.0, 1)

        def owed_s(now: float) -> float:
            return precedence(made)._owed_s(made, "chat", 1.4, now + 2.0, now)

        assert owed_s(13.0) == 0.0
        assert owed_s(13.7) == pytest.approx(0.6)  # 30 % of 2 s


class TestBeside:
    def beside_s(self, made: Backend, ahead_s: float, now: float = 0.0) -> float:
        return precedence(made).beside_s(made, "chat", 500, ahead_s, now)

    def test_full_steps_carry_a_chunk_of_the_document(self) -> None:
        made = backend(CHUNK)
        assert self.beside_s(made, 1.0) == 0.0
        document = made.send(Request("d", 120_000), "document", 0, now=0.0)
        chunk_s = document.prefill_s * CHUNK / 120_000
        step_s = made.cost.predict_s(3 * CHUNK, 3 * CHUNK)
        assert self.beside_s(made, 1.0) == pytest.approx(chunk_s / step_s)
        assert self.beside_s(made, 0.0) == 0.0

    def test_never_more_than_is_left_of_documents_that_get_their_turn(self) -> None:
        made = backend(CHUNK)
        document = made.send(Request("d", 6_000), "document", 0, now=0.0)
        assert self.beside_s(made, 100.0) == pytest.approx(document.prefill_s)
        queue(made, "document", 0.0, 5.0, 1)
        assert self.beside_s(made, 10.0, now=4.0) == pytest.approx(document.prefill_s)
        assert self.beside_s(made, 10.0, now=5.0) > document.prefill_s + 1.0

    def test_prefills_that_it_does_not_pass_are_in_the_line_already(self) -> None:
        made = backend(CHUNK)
        made.send(Request("c", 1_500), "chat", 0, now=0.0)
        assert self.beside_s(made, 1.0) == 0.0


class TestCrowd:
    """Many flows wait: sums over all of them are those of a look at each."""

    @pytest.mark.parametrize("seed", range(20))
    def test_sums_are_those_of_a_look_at_each_flow(self, seed: int) -> None:
        dice = random.Random(seed)
        fair = Fairness([Tenant("t1", 3.0), Tenant("t2", 0.5)], 1.0)
        fair.on = True
        made = Backend(BackendSpec("a", 64), BUCKETS.values(), fairness=fair)
        order = precedence(made, fair)
        here = list[QueuedRequest]()
        for number in range(150):
            tenant = f"t{dice.randrange(40)}"
            if here and dice.random() < 0.3:
                made.dequeue(gone := here.pop(dice.randrange(len(here))))
                fair.left_queue(gone.request.tenant)
                fair.charge(gone.request.tenant, gone.work_s, 0.0)
            if dice.random() < 0.2:
                fair.correct(tenant, dice.uniform(-1.0, 1.0))
            waiting = any_request(dice, tenant, number)
            if number % 10 == 0:
                self.compare(order, made, waiting)
            fair.arrived(tenant, 0.0)
            made.enqueue(waiting)
            fair.queued(tenant)
            here.append(waiting)
        assert any(queue.crowd for queue in made.queues.values())

    def compare(self, order: Precedence, made: Backend, waiting: QueuedRequest) -> None:
        deadline, due = waiting.deadline, waiting.due
        of_crowd, of_flows = Before(), Before()
        order._of_flows(of_crowd, made, waiting, deadline, due)
        late = {q: (q.seconds_before(due), q.urgent(due)) for q in made.queues.values()}
        crowds = {queue: queue.crowd for queue in made.queues.values()}
        for queue in crowds:
            queue.crowd = None
        order._of_flows(of_flows, made, waiting, deadline, due)
        assert of_crowd.seconds == pytest.approx(of_flows.seconds, abs=1e-8)
        # A flow's part is a whole request or none.
        assert abs(of_crowd.count - of_flows.count) <= 1 + 0.1 * of_flows.count
        for queue, crowd in crowds.items():
            assert late[queue][0] == pytest.approx(queue.seconds_before(due))
            assert late[queue][1] == pytest.approx(queue.urgent(due))
            queue.crowd = crowd


def any_request(dice: random.Random, tenant: str, number: int) -> QueuedRequest:
    bucket, own_rank = dice.choice(list(BUCKETS)), dice.randrange(len(CLASSES))
    rank = dice.choice([own_rank, 1, 1])
    deadline = dice.uniform(0.0, 30.0)
    waiting = QueuedRequest(
        Request(str(number), 100, tenant=tenant), bucket, 0.0, deadline, number,
        dice.uniform(0.01, 3.0), rank, own_rank,
    )  # fmt: skip
    waiting.due = deadline * dice.random()
    return waiting
