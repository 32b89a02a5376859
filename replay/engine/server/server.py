"""Start and stop the simulated vLLM server: an engine core and its API server.

Tests, the demo and the `engine` command use `start_engine`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from aiohttp import web

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.kv_events import FLAG, KvEvents, KvEventsConfig
from forebay.replay.engine.loop.core_loop import EngineLoop
from forebay.replay.engine.loop.faults import Fault
from forebay.replay.engine.loop.metrics import EngineMetrics
from forebay.replay.engine.loop.ranks import EngineRanks
from forebay.replay.engine.server.generation import Generator
from forebay.replay.engine.server.kv_publisher import open_publisher
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.pages import make_app
from forebay.traces.ground.errors import InputError

KEEP_ALIVE_S = 5.0  # wall time: uvicorn's default in vLLM, VLLM_HTTP_TIMEOUT_KEEP_ALIVE
SHUTDOWN_S = 1.0  # time for handlers to write their last chunks
BACKLOG = 2048  # uvicorn's default
DEFAULTS = ServerOptions(enable_prompt_tokens_details=True)  # tests and the demo read them


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A listening server. The task `stepping` ends if it fails or a fault killed the engine.

    Attributes:
        core, metrics: the engine's, of data-parallel ranks the first's.
    """

    host: str
    port: int
    core: EngineCore
    loop: EngineRanks
    metrics: EngineMetrics
    generator: Generator
    stepping: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def set_fault(self, fault: Fault | None) -> None:
        """Set the fault of requests from now on."""
        self.generator.fault = fault


@asynccontextmanager
async def start_engine(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    fault: Fault | None = None,
    options: ServerOptions = DEFAULTS,
) -> AsyncIterator[RunningEngine]:
    """Run a server for the time of the block, whose end ends streams as SIGTERM ends vLLM's.

    Raises InputError if KV events cannot be published or the model's ranks would share experts,
    OSError if the server cannot listen.
    """
    check_ranks(config, options.data_parallel_size)
    loop = EngineRanks(config, options.data_parallel_size)
    generator = Generator(config, loop, options, fault)
    async with AsyncExitStack() as stack:
        if options.kv_events is not None and options.kv_events.publishes:
            for rank, engine in enumerate(loop.loops):
                await stack.enter_async_context(_kv_events(engine, options.kv_events, rank))
        # A handler is cancelled when its client leaves, so that the engine drops the request.
        runner = web.AppRunner(
            make_app(config, options, loop, generator),
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_S,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
        )
        await runner.setup()
        stepping = asyncio.create_task(loop.run(), name="engine steps")
        closing = None
        # The port opens last, as in vLLM, which loads its model first.
        try:
            if options.startup_time:
                await asyncio.sleep(loop.wall_s(options.startup_time))
            site = web.TCPSite(runner, host, port, backlog=BACKLOG)
            await site.start()
            closing = asyncio.create_task(_close_when_dead(loop, site), name="engine death")
            bound = runner.addresses[0][1]
            first = loop.loops[0]
            yield RunningEngine(host, bound, first.core, loop, first.metrics, generator, stepping)
        finally:
            # As on SIGTERM: running requests may finish for a while, the others are aborted.
            if options.shutdown_timeout and not stepping.done():
                await loop.drain(options.shutdown_timeout)
            loop.abort_all()
            for task in (stepping, closing):
                if task is not None:
                    task.cancel()
            await runner.cleanup()
            for task in (stepping, closing):
                if task is not None:
                    with suppress(asyncio.CancelledError):
                        await task  # raises the task's exception if it failed


def check_ranks(config: EngineConfig, ranks: int) -> None:
    """Raise InputError for data-parallel ranks that cannot be simulated as engines of their own."""
    flag = f"--data-parallel-size {ranks}"
    if ranks > 1 and config.model_spec.mixture is not None:
        raise InputError(
            f"{flag}: ranks of {config.model_spec.name} share experts, which is not simulated; "
            "leave it out"
        )
    if ranks > 1 and config.api_server_count not in (1, ranks):
        raise InputError(
            f"--api-server-count {config.api_server_count}: with {flag} the API server has a "
            "process for each rank; leave it out"
        )


async def _close_when_dead(loop: EngineRanks, site: web.TCPSite) -> None:
    """Stop listening when the engine dies, because vLLM's API server then exits at once."""
    await loop.died.wait()
    await site.stop()


@asynccontextmanager
async def _kv_events(loop: EngineLoop, config: KvEventsConfig, rank: int) -> AsyncIterator[None]:
    """Publish the changes of the prefix cache, one batch for each step, like vLLM's scheduler.

    A reset between two steps is therefore published with the next step.

    Raises:
        InputError: the model has several groups of layers.
    """
    if loop.core.scheduler.tables.several:
        raise InputError(
            f"{FLAG}: events of layers with a window or a state are not simulated; for windows "
            "add --disable-hybrid-kv-cache-manager, with which all layers keep the whole context"
        )
    events = KvEvents(loop.core.limits.block_size)
    async with open_publisher(config, rank) as publisher:

        def publish() -> None:
            if batch := events.take():
                publisher.publish(batch)

        loop.core.pool.observer = events
        loop.after_step = publish
        try:
            yield
        finally:
            loop.core.pool.observer = loop.after_step = None
