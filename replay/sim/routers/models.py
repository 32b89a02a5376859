"""Model other routers in virtual time, for comparison with the proxy's policy.

Each model chooses an engine as the documentation and source of its router say. Constants are the
router's defaults. Models replace routers in simulations only. `tests/bench/routers` measures the
real routers. `base` is common to all models, `token_routers` has the models that weigh prompt
tokens.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf, sqrt
from random import Random
from typing import Final
from zlib import crc32

from forebay.proxy.core.model import Action, Reject, Request, Send
from forebay.replay.sim.routers.base import EngineView, RouterModel
from forebay.replay.sim.routers.token_routers import Dynamo, DynamoQueues, LlmD, LMetric

CHARS_PER_TOKEN: Final = 4
TREE_CHARS: Final = 33_554_432  # size of a worker's tree in vllm-router, half of sglang-router's
VIRTUAL_NODES: Final = 160  # points of each engine on a hash ring


class LeastConnections(RouterModel):
    """nginx least_conn, HAProxy leastconn, Envoy LEAST_REQUEST over all: fewest in flight.

    Ties are broken in turn, as in nginx.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def choose(self, request: Request) -> EngineView:
        self._turn += 1
        count = len(self.places)
        turns = [self.places[(self._turn + at) % count] for at in range(count)]
        return min(turns, key=lambda p: p.running)


class PowerOfTwo(RouterModel):
    """Envoy's default, vllm-router power_of_two: the less busy of two random engines."""

    def __init__(self) -> None:
        super().__init__()
        self._dice = Random(0)

    def choose(self, request: Request) -> EngineView:
        if len(self.places) < 2:
            return self.places[0]
        first, other = self._dice.sample(self.places, 2)
        return first if first.running <= other.running else other


class LeastConnectionsQueue(LeastConnections):
    """HAProxy leastconn with `maxconn` for each server, and one queue in order of arrival.

    A request that has waited for `timeout queue` is rejected.
    """

    QUEUE_S: Final = 30.0

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._queue: deque[tuple[float, Request]] = deque()

    def arrive(self, request: Request, now: float) -> list[Action]:
        place = self.choose(request)
        if place.running < self._most:
            return [self.send(request, place, now)]
        self._queue.append((now, request))
        return []

    def finish(self, request_id: str, now: float) -> list[Action]:
        place = self.sent[request_id].place
        super().finish(request_id, now)
        if not self._queue:
            return []
        came, request = self._queue.popleft()
        return [self.send(request, place, now, now - came)]

    def wake_at(self) -> float:
        return self._queue[0][0] + self.QUEUE_S if self._queue else inf

    def wake(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while self.wake_at() <= now:
            _, request = self._queue.popleft()
            actions.append(Reject(request, "queue_full", "", self.QUEUE_S, 1.0))
        return actions


class Ring(RouterModel):
    """A router with a hash ring. The key is the first block of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._ring: list[tuple[int, int]] = []  # position on the ring, number of the engine

    def backend_up(self, name: str, now: float, kv_tokens: float | None = None) -> list[Action]:
        number = len(self.places)
        for node in range(VIRTUAL_NODES):
            self._ring.append((crc32(f"{name}#{node}".encode()), number))
        self._ring.sort()
        return super().backend_up(name, now, kv_tokens)

    def around(self, request: Request) -> list[EngineView]:
        """List all engines, in the order of the ring from the position of this prompt."""
        key = str(request.blocks[0]) if request.blocks else request.id
        low = bisect_left(self._ring, (crc32(key.encode()), -1))
        places: list[EngineView] = []
        for step in range(len(self._ring)):
            place = self.places[self._ring[(low + step) % len(self._ring)][1]]
            if place not in places:
                places.append(place)
                if len(places) == len(self.places):
                    break
        return places

    def fair_load(self) -> float:
        """Return 1.25 times the mean number in flight, including this request."""
        return 1.25 * (sum(p.running for p in self.places) + 1) / len(self.places)


class ConsistentHash(Ring):
    """nginx `hash $prompt_prefix consistent`, which ignores load."""

    def choose(self, request: Request) -> EngineView:
        return self.around(request)[0]


class BoundedHash(Ring):
    """KubeAI's CHWBL: the next engine on the ring with at most 1.25 times the mean in flight."""

    def choose(self, request: Request) -> EngineView:
        around, most = self.around(request), self.fair_load()
        for place in around:
            if place.running <= most:
                return place
        return around[0]


class SmgPrefixHash(Ring):
    """SMG 1.13 prefix_hash: the engine of the ring, or else the least loaded one.

    The engine of the ring is skipped when it has more than 1.25 times the mean in flight and more
    than 10 requests above the mean.
    """

    def choose(self, request: Request) -> EngineView:
        place = self.around(request)[0]
        mean = sum(p.running for p in self.places) / len(self.places)
        if place.running > self.fair_load() and place.running > mean + 10:
            return self.least_running()
        return place


class CacheAware(RouterModel):
    """sglang-router 0.3.2 and vllm-router 0.1.17 cache_aware (on /v1/completions).

    A request goes to the engine that matches more than 0.3 of its prompt, else to the least loaded
    one. All requests go to the least loaded engine while loads differ by more than 64 and by a
    factor of 1.5.
    """

    THRESHOLD: Final = 0.3
    ABSOLUTE: Final = 64
    RELATIVE: Final = 1.5

    def send(self, request: Request, place: EngineView, now: float, queued_s: float = 0.0) -> Send:
        place.index.capacity_blocks = int(TREE_CHARS / (CHARS_PER_TOKEN * request.block_tokens))
        return super().send(request, place, now, queued_s)

    def best_match(self, request: Request) -> EngineView | None:
        """Return the engine with the longest match, if that is more than THRESHOLD."""
        best, most = None, self.THRESHOLD * request.prompt_tokens
        for place in self.places:
            matched = place.matched(request)
            if matched > most:
                best, most = place, float(matched)
        return best

    def choose(self, request: Request) -> EngineView:
        least = self.least_running()
        most = max(p.running for p in self.places)
        if most - least.running > self.ABSOLUTE and most > self.RELATIVE * least.running:
            return least
        return self.best_match(request) or least


class SmgCacheAware(CacheAware):
    """SMG 1.13 cache_aware: the engine with the match, unless that engine is too busy.

    Too busy: above the mean in flight by min(64, max(4, 2 sigma)) and by a factor of 1.5. Sigma is
    the root of the mean, as for random arrivals. With it, 32 requests for one document divide
    24 to 8, as was measured (68 to 28 of 96).
    """

    def choose(self, request: Request) -> EngineView:
        best = self.best_match(request)
        if best is None:
            return self.least_running()
        mean = sum(p.running for p in self.places) / len(self.places)
        spill = min(64.0, max(4.0, 2.0 * sqrt(mean)))
        if best.running > mean + spill and best.running > 1.5 * mean:
            return self.least_running()
        return best


ROUTER_MODELS: dict[str, tuple[Callable[[], RouterModel], str]] = {
    "least_connections": (LeastConnections, "model of nginx least_conn, HAProxy leastconn"),
    "power_of_two": (PowerOfTwo, "model of Envoy, vllm-router power_of_two"),
    "leastconn_8": (
        partial(LeastConnectionsQueue, 8),
        "model of HAProxy leastconn, maxconn 8, queue",
    ),
    "leastconn_64": (
        partial(LeastConnectionsQueue, 64),
        "model of HAProxy leastconn, maxconn 64, queue",
    ),
    "consistent_hash": (ConsistentHash, "model of nginx hash of the prompt's beginning"),
    "bounded_hash": (BoundedHash, "model of KubeAI CHWBL 1.25"),
    "cache_aware": (CacheAware, "model of sglang-router, vllm-router cache_aware"),
    "smg_cache_aware": (SmgCacheAware, "model of SMG 1.13 cache_aware"),
    "smg_prefix_hash": (SmgPrefixHash, "model of SMG 1.13 prefix_hash"),
    "llm_d": (LlmD, "model of llm-d-router affinity 0.80, token load"),
    "dynamo": (Dynamo, "model of Dynamo's KV router"),
    "dynamo_queues": (DynamoQueues, "model of Dynamo 1.6 with policy-class queues"),
    "lmetric": (LMetric, "model of LMetric (OSDI 2026): prefill tokens x batch size"),
}
"""For each policy name: the function that makes the model, and the routers it is a model of."""
