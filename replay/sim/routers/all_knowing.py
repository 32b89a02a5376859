"""Route by the true contents of the engines' caches: a reference for hit ratios.

This router sees each engine's prefix cache at the instant of an arrival. It also counts blocks of
prompts that were sent and have no first token yet, because a later prompt will hit them. A request
goes to the engine where most of its prompt will be hit, however busy that engine is. If no engine
would hit more than a quarter of the prompt, the request goes to the engine with the least uncached
prefill left. So a prefix that all prompts share attracts no request. No request is rejected.

This is not the best possible hit ratio, which would need the future. But no router that knows less
can be expected to exceed it.
"""

from collections.abc import Mapping
from math import inf
from typing import Final

from forebay.proxy.core.model import Action, Request, Send
from forebay.replay.sim.engine.served import ServedEngine
from forebay.replay.sim.engine.skipping import SkippingEngine
from forebay.replay.sim.routers.base import EngineView, RouterModel

MIN_MATCH: Final = 0.25


class AllKnowing(RouterModel):
    def __init__(self) -> None:
        super().__init__()
        self._engines: list[SkippingEngine] = []
        # For each engine: blocks of prompts without a first token, and in how many prompts.
        self._coming: list[dict[int, int]] = []

    def look_into(self, engines: Mapping[str, ServedEngine]) -> None:
        """Set the engines, in the order in which they come up."""
        for served in engines.values():
            engine = served.engine
            assert isinstance(engine, SkippingEngine), "needs engines that skip (not --exact)"
            self._engines.append(engine)
            self._coming.append({})

    def choose(self, request: Request) -> EngineView:
        best, most = self.places[0], MIN_MATCH * request.prompt_tokens
        is_hit = False
        for place in self.places:
            matched = self._will_hit(place.number, request)
            if matched > most:
                best, most, is_hit = place, float(matched), True
        if is_hit:
            return best
        least = inf
        for place in self.places:
            if place.prefill_tokens < least:
                best, least = place, float(place.prefill_tokens)
        return best

    def send(self, request: Request, place: EngineView, now: float, queued_s: float = 0.0) -> Send:
        coming = self._coming[place.number]
        for block in request.blocks:
            coming[block] = coming.get(block, 0) + 1
        return super().send(request, place, now, queued_s)

    def first_token(self, request_id: str, now: float) -> list[Action]:
        sent = self.sent[request_id]
        if sent.answered:
            return []
        coming = self._coming[sent.place.number]
        for block in sent.request.blocks:
            if coming[block] == 1:
                del coming[block]
            else:
                coming[block] -= 1
        return super().first_token(request_id, now)

    def _will_hit(self, number: int, request: Request) -> int:
        blocks, tokens = request.blocks, request.prompt_tokens
        if not blocks:
            return 0
        coming, ahead = self._coming[number], 0
        while ahead < len(blocks) and blocks[ahead] in coming:
            ahead += 1
        cached = self._engines[number].cached_tokens(blocks, int(request.block_tokens), tokens)
        return max(cached, int(ahead * request.block_tokens))
