"""Copies of KV blocks in the host's memory (--kv-offloading-size), and their way to the GPU.

The rules follow `OffloadingConnectorScheduler` and the LRU policy of vLLM 0.32. Only blocks of
prompts are copied (its default, `offload_prompt_only`), when a step computes them. The time to copy
to the host is not simulated.
"""

from collections import OrderedDict, deque
from itertools import islice

from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.engine.request import EngineRequest


class HostCopies:
    """The contents of blocks in the host's memory, least recently used first, and present loads.

    One load runs at a time. A new one queues behind the last.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._blocks = limits.host_blocks
        self._block_s = limits.host_block_s
        self._block_size = limits.block_size
        self._copies: OrderedDict[int, None] = OrderedDict()
        # End, request and hashes of each load, in the order of the ends.
        self._loads: deque[tuple[float, EngineRequest, list[int]]] = deque()
        self._arriving: set[int] = set()
        self._free_s = 0.0  # end of the last load

    @property
    def busy(self) -> bool:
        """Return True while blocks are loaded, if only for requests that are gone."""
        return bool(self._loads)

    def store(self, request: EngineRequest) -> None:
        """Copy the computed blocks of a prompt that were not offered: all, or none without room.

        Refused blocks are offered again in the request's next step.
        """
        copies, full = self._copies, self._full(request)
        offered = request.hashes[request.offered : full]
        new = [block_hash for block_hash in offered if block_hash not in copies]
        surplus = len(copies) + len(new) - self._blocks
        if surplus > 0:
            pinned = self._arriving.union(offered)
            others = (block_hash for block_hash in copies if block_hash not in pinned)
            victims = list(islice(others, surplus))
            if len(victims) < surplus:
                return
            for victim in victims:
                del copies[victim]
        copies.update(dict.fromkeys(new))
        request.offered = max(request.offered, full)

    def touch(self, request: EngineRequest) -> None:
        """Count the copies of a prompt as used by a request that ends.

        The first block counts as used last, so that it is evicted last.
        """
        for block_hash in reversed(request.hashes[: self._full(request)]):
            if block_hash in self._copies:
                self._copies.move_to_end(block_hash)

    def run(self, request: EngineRequest, first: int, stop: int) -> list[int] | None:
        """Return the hashes of blocks from `first` up to `stop` with copies, without a gap.

        None: another request loads some of them at present.
        """
        run: list[int] = []
        for block_hash in request.hashes[first:stop]:
            if block_hash not in self._copies:
                break
            run.append(block_hash)
        return run if self._arriving.isdisjoint(run) else None

    def load(self, request: EngineRequest, run: list[int], now: float) -> None:
        """Begin to load a run of a request's blocks."""
        self._arriving.update(run)
        self._free_s = max(now, self._free_s) + self._block_s * len(run)
        self._loads.append((self._free_s, request, run))

    def loading(self) -> list[EngineRequest]:
        """Return the requests that wait for their blocks, the first to end first."""
        return [request for _, request, _ in self._loads if not request.aborted]

    def loaded(self, now: float) -> EngineRequest | None:
        """Return the next request whose load has ended, once, or None."""
        if not self._loads or self._loads[0][0] > now:
            return None
        _, request, run = self._loads.popleft()
        self._arriving.difference_update(run)
        return request

    def _full(self, request: EngineRequest) -> int:
        """Return the number of blocks of a prompt that are in the prefix cache."""
        return min(request.registered, request.prompt_tokens // self._block_size)
