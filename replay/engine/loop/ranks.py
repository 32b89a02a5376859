"""The engines behind one URL: one, or the data-parallel ranks of a server, and vLLM's choice.

Ranks of a dense model share nothing but the API server, so each is an engine with a loop of its
own. The choice follows DPLBAsyncMPClient of vLLM 0.32, whose counts are up to 100 ms old. Here they
are up to date.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.loop.core_loop import EngineLoop, Unavailable
from forebay.replay.engine.loop.metrics import EngineMetrics
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.timing.api_server import ApiProcess


class EngineRanks:
    """The loops of a server's engines, in the order of their ranks. Times are simulated seconds.

    With several ranks the API server has a process for each, as vLLM by default. A request may pass
    through the process of another rank.
    """

    def __init__(self, config: EngineConfig, ranks: int = 1) -> None:
        own = replace(config, api_server_count=1) if ranks > 1 else config
        cores = [new_core(own) for _ in range(ranks)]
        self.loops = tuple(
            EngineLoop(core, EngineMetrics(core, config.served_name), config.time_scale)
            for core in cores
        )
        self._config = config
        self._first = self._turn = 0  # where the next choice, and the next prompt, begins

    @property
    def died(self) -> asyncio.Event:
        """The event that an injected fault killed the server: all of its engines."""
        return self.loops[0].died

    @property
    def metrics(self) -> Sequence[EngineMetrics]:
        return [loop.metrics for loop in self.loops]

    def now(self) -> float:
        """Return the simulated seconds since the start."""
        return self.loops[0].now()

    def wall_s(self, simulated_s: float) -> float:
        return self.loops[0].wall_s(simulated_s)

    def unavailable(self) -> Unavailable | None:
        """Return why a request would be rejected now, and count a rejection by a queue limit.

        The limits hold for the whole server: vLLM counts in front of the ranks.
        """
        config, first = self._config, self.loops[0]
        if first.died.is_set():
            return Unavailable.ENGINE_DEAD
        if first.draining:
            return Unavailable.SHUTTING_DOWN
        limit = config.max_num_queued_reqs
        if limit is not None and sum(map(_unfinished, self.loops)) >= limit:
            return self._over_limit(Unavailable.QUEUE_FULL)
        limit = config.max_num_queued_tokens
        if limit is not None and sum(loop.backlog_tokens for loop in self.loops) >= limit:
            return self._over_limit(Unavailable.BACKLOG_FULL)
        return None

    async def receive(self, prompt_tokens: int, *, text: bool) -> ApiProcess:
        """Wait until the API server has read and tokenized a prompt, and return the process."""
        loop = self.loops[self._turn]
        self._turn = (self._turn + 1) % len(self.loops)
        return await loop.receive(prompt_tokens, text=text)

    def add(self, request: EngineRequest, rank: int | None = None) -> None:
        """Queue a request at the rank that its client chose, else at the least loaded one."""
        loop = self.loops[self._choose() if rank is None else rank]
        request.queued_s = loop.now()
        loop.add(request)

    def abort(self, request: EngineRequest) -> None:
        """Drop a request whose client has left. Only one rank knows its id."""
        for loop in self.loops:
            loop.abort(request)

    def abort_all(self) -> None:
        """End every request with finish reason "abort", as vLLM does on SIGTERM."""
        for loop in self.loops:
            loop.abort_all()

    async def drain(self, timeout_s: float) -> None:
        """Accept no more requests and let the present ones finish within `timeout_s`."""
        await asyncio.gather(*(loop.drain(timeout_s) for loop in self.loops))

    def die(self) -> None:
        """End like a server one of whose engines crashed: vLLM then ends the others, too."""
        for loop in self.loops:
            loop.die()

    def forget_all(self) -> bool:
        """Drop all prefix caches, and return True if rank 0 dropped its cache, as vLLM does.

        A rank drops its cache only while no request holds a block.
        """
        answers = [loop.core.pool.forget_all() for loop in self.loops]
        return answers[0]

    async def run(self) -> None:
        """Step all engines until cancelled or dead. The first failure ends the others."""
        stepping = [asyncio.create_task(loop.run()) for loop in self.loops]
        try:
            await asyncio.gather(*stepping)
        finally:
            for task in stepping:
                task.cancel()

    def _choose(self) -> int:
        """Return the rank with the lowest load. The first of equals moves on with each choice."""
        count = len(self.loops)
        order = [(self._first + n) % count for n in range(count)]
        self._first = (self._first + 1) % count
        return min(order, key=lambda rank: _load(self.loops[rank]))

    def _over_limit(self, limit: Unavailable) -> Unavailable:
        self.loops[0].metrics.rejections[limit.value] += 1
        return limit


def _unfinished(loop: EngineLoop) -> int:
    return loop.core.running + loop.core.waiting


def _load(loop: EngineLoop) -> float:
    """Return vLLM's score: its requests, and more for waiting ones where the KV cache is full."""
    waiting = loop.core.waiting
    return _unfinished(loop) + waiting * 6.0 * max(0.0, loop.core.kv_usage - 0.5)
