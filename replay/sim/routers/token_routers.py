"""Model the routers that weigh prompt tokens: llm-d-router, NVIDIA Dynamo, LMetric."""

from heapq import heappop, heappush
from math import ceil, inf
from typing import Final

from forebay.proxy.core.model import Action, Reject, Request, Send
from forebay.replay.sim.routers.base import EngineView, RouterModel


class LlmD(RouterModel):
    """llm-d-router: of the engines that match 0.80 of the prompt, the least loaded one.

    Load is prompt tokens in flight. If its first token would come 18 s later than on the least
    loaded engine of all, the request goes there.
    """

    AFFINITY: Final = 0.80
    STICKY_S: Final = 18.0
    TOKENS_PER_S: Final = 15_928.0

    def send(self, request: Request, place: EngineView, now: float, queued_s: float = 0.0) -> Send:
        _bound_by_pool(place, request)
        return super().send(request, place, now, queued_s)

    def choose(self, request: Request) -> EngineView:
        least = min(self.places, key=lambda p: p.tokens)
        enough = self.AFFINITY * request.prompt_tokens
        holders = [p for p in self.places if p.matched(request) >= enough]
        if not holders:
            return least
        best = min(holders, key=lambda p: p.tokens)
        later_s = (best.tokens - least.tokens) / self.TOKENS_PER_S
        return least if later_s > self.STICKY_S else best


class Dynamo(RouterModel):
    """NVIDIA Dynamo's KV router with events: the lowest cost, in tokens.

    The cost is the prefill left to do, including the uncached part of this prompt, plus the prompt
    tokens of requests in flight.
    """

    def send(self, request: Request, place: EngineView, now: float, queued_s: float = 0.0) -> Send:
        _bound_by_pool(place, request)
        return super().send(request, place, now, queued_s)

    def choose(self, request: Request) -> EngineView:
        best, least = self.places[0], inf
        for place in self.places:
            prefill = place.prefill_tokens + request.prompt_tokens - place.matched(request)
            cost = self.cost(place, request, prefill)
            if cost < least:
                best, least = place, float(cost)
        return best

    def cost(self, place: EngineView, request: Request, prefill_tokens: int) -> int:
        return prefill_tokens + place.tokens + request.prompt_tokens


class LMetric(Dynamo):
    """LMetric: the least product of prefill left to do and batch size, with this request in both.

    Zhang et al., "Simple is Better: Multiplication May Be All You Need for LLM Request Scheduling",
    OSDI 2026, arXiv 2603.15202. The second factor counts this request, as ai-dynamo/dynamo#11028
    (`lmetric`) does, so that two idle engines differ by their caches.
    """

    def cost(self, place: EngineView, request: Request, prefill_tokens: int) -> int:
        return prefill_tokens * (place.running + 1)


class PolicyClass:
    """One of Dynamo's policy classes: a queue and its deficit, in uncached tokens.

    Attributes:
        quantum: tokens that the class earns a round.
        shortest_first: order by uncached tokens (`wspt`), else by arrival (`fcfs`).
        most_requests, most_tokens: limits for each engine, requests and prompt tokens.
    """

    def __init__(
        self, quantum: int, shortest_first: bool, most_requests: int, most_tokens: float
    ) -> None:
        self.quantum = quantum
        self.shortest_first = shortest_first
        self.most_requests = most_requests
        self.most_tokens = most_tokens
        self.deficit = 0
        self.tokens = 0  # prompt tokens of what waits
        # Order, number, uncached tokens, arrival in seconds, request.
        self.waiting: list[tuple[int, int, int, float, Request]] = []

    @property
    def head_cost(self) -> int:
        return self.waiting[0][2]


class DynamoQueues(Dynamo):
    """Dynamo 1.6 with its policy-class queues: weighted deficit round robin in front of the router.

    While every engine has more than BUSY_TOKENS of prefill left, requests wait in the class of
    their uncached tokens. Classes and limits are from Dynamo's sample policy
    (`examples/router/policy-class-queues.yaml`), the rounds from its page "Deficit Round Robin
    Queue Scheduling". Queues are off by default (ai-dynamo/dynamo#11599).
    """

    BUSY_TOKENS: Final = 16 * 8_192  # `prefill_busy_threshold_frac` 16 of max_num_batched_tokens
    UNCACHED_FROM: Final = 3_072  # tokens: shorter prefills are of the class `cached`

    def __init__(self) -> None:
        super().__init__()
        self._classes = [
            PolicyClass(2_048, True, 1_024, inf),
            PolicyClass(512, False, 512, 1_048_576.0),
        ]
        self._turn = 0  # whose turn it is
        self._number = 0

    def arrive(self, request: Request, now: float) -> list[Action]:
        cost = max(1, request.prompt_tokens - max(p.matched(request) for p in self.places))
        queue = self._classes[cost >= self.UNCACHED_FROM]
        engines = len(self.places)
        if len(queue.waiting) >= queue.most_requests * engines or (
            queue.tokens >= queue.most_tokens * engines
        ):
            return [Reject(request, "queue_full", "", 0.0, 1.0)]
        self._number += 1
        order = cost if queue.shortest_first else self._number
        heappush(queue.waiting, (order, self._number, cost, now, request))
        queue.tokens += request.prompt_tokens
        return self._drain(now)

    def first_token(self, request_id: str, now: float) -> list[Action]:
        return super().first_token(request_id, now) + self._drain(now)

    def _drain(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while any(queue.waiting for queue in self._classes) and any(
            place.prefill_tokens <= self.BUSY_TOKENS for place in self.places
        ):
            queue = self._next()
            _, _, cost, came, request = heappop(queue.waiting)
            queue.deficit -= cost
            queue.tokens -= request.prompt_tokens
            if not queue.waiting:
                queue.deficit = 0
            if not queue.waiting or queue.deficit < queue.head_cost:
                self._turn += 1
            actions.append(self.send(request, self.choose(request), now, now - came))
        return actions

    def _next(self) -> PolicyClass:
        """Return the class that may send its head, after the classes earned credit in rounds."""
        count = len(self._classes)
        for _ in range(count):
            queue = self._classes[self._turn % count]
            if queue.waiting:
                if queue.deficit < queue.head_cost:
                    queue.deficit += queue.quantum
                if queue.deficit >= queue.head_cost:
                    return queue
            self._turn += 1
        busy = [queue for queue in self._classes if queue.waiting]
        rounds = min(ceil((q.head_cost - q.deficit) / q.quantum) for q in busy)
        for queue in busy:
            queue.deficit += rounds * queue.quantum
        while (
            not (queue := self._classes[self._turn % count]).waiting
            or queue.deficit < queue.head_cost
        ):
            self._turn += 1
        return queue


def _bound_by_pool(place: EngineView, request: Request) -> None:
    """Limit the index to the size of the engine's KV pool, which the router knows."""
    if place.kv_tokens < inf:
        place.index.capacity_blocks = int(place.kv_tokens / request.block_tokens)
