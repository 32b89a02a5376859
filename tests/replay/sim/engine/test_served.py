"""An engine behind its API server: what a client has, and when."""

import asyncio
from collections import defaultdict
from itertools import pairwise
from math import inf

import pytest

from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.calibration.play import play
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.loop.core_loop import EngineLoop
from forebay.replay.engine.loop.metrics import EngineMetrics
from forebay.replay.engine.request import EngineRequest
from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.served import served_engine

CONFIG = EngineConfig(max_model_len=131_072)
DOCUMENT = 114_000  # its last chunk is the longest step
SENT = {"chat": (0.0, 100, 400), "document": (0.5, DOCUMENT, 2), "later": (10.0, 100, 50)}
"""When each is sent, its prompt and its answer. `later` comes after the document's first token."""


def engine_requests() -> list[EngineRequest]:
    return [
        EngineRequest(name, prompt, answer, [], arrival_s=at)
        for name, (at, prompt, answer) in SENT.items()
    ]


def client_times(requests: list[EngineRequest]) -> dict[str, list[float]]:
    """When a client has each token."""
    times = defaultdict[str, list[float]](list)
    play(new_core(CONFIG), requests, lambda request, at: times[request.id].append(at))
    return times


@pytest.mark.parametrize("exact", [True, False])
def test_the_longest_pause_of_an_answer_is_the_clients(exact: bool) -> None:
    """While the server decodes the document's prompt, the chat's token of that step waits."""
    requests = {
        name: SimRequest(name, prompt, answer) for name, (_, prompt, answer) in SENT.items()
    }
    unsent = sorted((at, name) for name, (at, *_) in SENT.items())
    engine = served_engine(CONFIG, exact=exact)
    while unsent or engine.next_at() < inf:
        if unsent and unsent[0][0] <= engine.next_at():
            at, name = unsent.pop(0)
            engine.send(requests[name], at)
        else:
            engine.advance(engine.next_at())
    times = client_times(engine_requests())
    for name in ("chat", "later"):
        longest_s = max(b - a for a, b in pairwise(times[name]))
        assert requests[name].stall_s == pytest.approx(longest_s, abs=1e-4)
    decoded_s = CONFIG.step_constants().server_times().answer_token_s * DOCUMENT
    assert requests["chat"].stall_s > last_step_s(requests["document"]) + 0.9 * decoded_s


def last_step_s(document: SimRequest) -> float:
    """The last step of the document alone."""
    core = new_core(CONFIG)
    core.add(EngineRequest(document.id, document.prompt_tokens, 1))
    last = []
    while core.has_work:
        last.append(core.step(0.0).duration_s)
    return last[-1]


class Heard:
    """A client of the engine loop: when it has each token."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.ended = asyncio.Event()

    def push(self, produced: int) -> None:
        self.at.append(asyncio.get_running_loop().time())

    def end(self, produced: int, reason: str) -> None:
        self.push(produced)
        self.ended.set()


def test_the_live_engine_sends_tokens_when_the_simulated_one_does() -> None:
    async def main() -> dict[str, list[float]]:
        core = new_core(CONFIG)
        engine = EngineLoop(core, EngineMetrics(core, "m"))
        running = asyncio.create_task(engine.run())
        start, heard = asyncio.get_running_loop().time(), {}

        async def client(request: EngineRequest) -> None:
            await asyncio.sleep(request.arrival_s)
            request.sink = heard[request.id] = Heard()
            request.process = await engine.receive(request.prompt_tokens, text=True)
            engine.add(request)
            await request.sink.ended.wait()

        await asyncio.gather(*map(client, engine_requests()))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return {name: [at - start for at in sink.at] for name, sink in heard.items()}

    live, played = run(main()), client_times(engine_requests())
    for name in SENT:
        assert live[name] == pytest.approx(played[name], abs=1e-3)
