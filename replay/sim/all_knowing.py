"""A reference for hit ratios: a router that looks into the engines instead of guessing.

It sees what each engine's cache holds at the instant of the arrival, and what is on the way there:
blocks of prompts sent and not answered yet, which a later prompt will hit. It sends a request to
the engine where most of the prompt will be hit, however busy that is, if that is more than a
quarter of it (what everybody shares draws nobody), else to the engine with the least uncached
prefill left. It refuses nothing. Not the best hit ratio there can be, which would need the future;
no router that knows less can be expected to beat it.
"""

from collections.abc import Mapping
from math import inf
from typing import Final

from forebay.proxy.core.model import Action, Request, Send
from forebay.replay.sim.peers import Peer, Place
from forebay.replay.sim.skipping import SkippingEngine
from forebay.replay.sim.stepping import SteppingEngine

MIN_MATCH: Final = 0.25


class AllKnowing(Peer):
    def __init__(self) -> None:
        super().__init__()
        self._engines: list[SkippingEngine] = []
        self._coming: list[dict[int, int]] = []  # by engine: blocks, and in how many prompts

    def look_into(self, engines: Mapping[str, SkippingEngine | SteppingEngine]) -> None:
        """These are the engines, in the order in which they come up."""
        for engine in engines.values():
            assert isinstance(engine, SkippingEngine), "needs engines that skip (not --exact)"
            self._engines.append(engine)
            self._coming.append({})

    def choose(self, request: Request) -> Place:
        best, most = self.places[0], MIN_MATCH * request.prompt_tokens
        found = False
        for place in self.places:
            matched = self._will_hit(place.number, request)
            if matched > most:
                best, most, found = place, float(matched), True
        if found:
            return best
        least = inf
        for place in self.places:
            if place.prefill_tokens < least:
                best, least = place, float(place.prefill_tokens)
        return best

    def send(self, request: Request, place: Place, now: float, queued_s: float = 0.0) -> Send:
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
        held = self._engines[number].cached_tokens(blocks, int(request.block_tokens), tokens)
        return max(held, int(ahead * request.block_tokens))
