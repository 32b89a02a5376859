"""The simulator and the asyncio driver make the same decisions at the same times.

The driver runs on a loop whose clock jumps, in front of the engine loop that the simulated
server uses; the simulator plays the same trace on an event heap.
"""

import asyncio
import itertools
from contextlib import suppress

import pytest
from parity_scene import NAMES, a_shaper, a_trace

from forebay.proxy.core.model import Action, Reject, Send
from forebay.proxy.driver import Driver, Grant, Rejected
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.loop import EngineLoop
from forebay.replay.engine.metrics import EngineMetrics
from forebay.replay.sim.clock import run
from forebay.replay.sim.fleet import Fleet, Journal, proxy_request, sim_request
from forebay.replay.sim.skipping import SkippingEngine
from forebay.replay.sim.stepping import SteppingEngine, engine_request
from forebay.traces.schema import TraceRequest


def an_engine() -> EngineCore:
    return EngineCore(EngineConfig())


class Listener:
    """A client of the engine loop: the first token comes as a call, the end as an event."""

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.ended = asyncio.Event()

    def push(self, produced: int) -> None:
        if produced == 1:
            self.grant.first_token()

    def end(self, produced: int, reason: str) -> None:
        self.push(produced)
        self.ended.set()


async def drive(trace: list[TraceRequest]) -> Journal:
    journal: Journal = []
    loop = asyncio.get_running_loop()
    start = loop.time()
    sent = itertools.count()
    shaper, cores = a_shaper(), {name: an_engine() for name in NAMES}
    loops = {name: EngineLoop(core, EngineMetrics(core, name)) for name, core in cores.items()}
    driver = Driver(shaper, lambda now, action: journal.append((now - start, action)))
    for name in NAMES:
        driver.backend_up(name, float(cores[name].kv_tokens))

    async def client(row: TraceRequest) -> None:
        await asyncio.sleep(start + row.arrival_s - loop.time())
        with suppress(Rejected):
            async with driver.slot(proxy_request(row)) as grant:
                engine = cores[grant.send.backend]
                # asyncio wakes timers of one instant in any order; the engine takes requests in
                # the order in which they were sent.
                await asyncio.sleep(engine.request_s + next(sent) * 1e-11)
                block_size = engine.limits.block_size
                request = engine_request(sim_request(row), loop.time(), block_size)
                request.sink = listener = Listener(grant)
                loops[grant.send.backend].add(request)
                await listener.ended.wait()
                output_tokens = row.output_tokens if shaper.wants_usage else 0
                grant.report_usage(output_tokens, max(0, request.cached_tokens), row.input_tokens)

    steppers = [asyncio.create_task(engine.run()) for engine in loops.values()]
    async with asyncio.TaskGroup() as group:
        for row in trace:
            group.create_task(client(row))
    for stepper in steppers:
        stepper.cancel()
    await asyncio.gather(*steppers, return_exceptions=True)
    driver.close()
    return journal


def decisions(journal: Journal) -> list[tuple[str, str, str]]:
    def words(action: Action) -> tuple[str, str, str]:
        if isinstance(action, Send):
            return action.request.id, "send", action.backend
        return action.request.id, "reject", action.reason

    return [words(action) for _, action in journal]


def simulate(trace: list[TraceRequest], engine: type[SkippingEngine | SteppingEngine]) -> Journal:
    journal: Journal = []
    engines = {name: engine(EngineConfig()) for name in NAMES}
    Fleet(a_shaper(), engines, lambda now, action: journal.append((now, action))).run(trace)
    return journal


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("engine", [SteppingEngine, SkippingEngine])
def test_same_journal(seed: int, engine: type[SkippingEngine | SteppingEngine]) -> None:
    trace = a_trace(seed)
    simulated = simulate(trace, engine)
    driven = run(drive(trace))
    assert decisions(driven) == decisions(simulated)
    assert [t for t, _ in driven] == pytest.approx([t for t, _ in simulated], abs=1e-6)
    # The trace is worth comparing: some waited, and some were refused.
    actions = [action for _, action in simulated]
    assert any(action.queued_s > 0 for action in actions)
    assert any(isinstance(action, Reject) for action in actions)


def test_the_same_trace_twice_is_the_same_to_the_bit() -> None:
    trace = a_trace(7)
    assert simulate(trace, SkippingEngine) == simulate(trace, SkippingEngine)
