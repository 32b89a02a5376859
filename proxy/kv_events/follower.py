"""Follow the KV events of the engines, so that their prefix indexes are exact.

vLLM publishes over ZeroMQ: [topic, sequence number (8 bytes, big-endian), msgpack [time, events,
rank]]. A replay endpoint answers ["", first number] with the batches it still has. Missed batches
are requested there. If they are lost, the index is dropped and routing uses estimates again, until
the cache is cleared or all unknown blocks have been evicted. No request waits for any of this.
"""

import asyncio
from collections.abc import Callable
from math import inf
from types import ModuleType
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay.proxy.backends.pool import Backends
from forebay.proxy.config.backends import BackendConfig
from forebay.proxy.config.schema import Config
from forebay.proxy.core.learn.engine_blocks import BlockTranslations, EngineBlocks
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.driver import Driver
from forebay.proxy.kv_events.decode import BadEvent, KvBlocks, NoSalt
from forebay.proxy.kv_events.tokenize import Translator
from forebay.proxy.log_events import LogEvent, Say
from forebay.traces.ground.errors import InputError

END = (-1).to_bytes(8, "big", signed=True)  # sequence number of the end of a replay
QUIET_S = 5.0  # without a batch; then a replay is requested, as the last one may be lost
REPLAY_S = 5.0  # longest wait for one message of a replay
AGAIN_S = 5.0  # delay after an unexpected error
WAITING_BATCHES = 10_000  # bound of ZeroMQ's queue; beyond it drops batches, and we replay
BATCH_BYTES = 16 << 20  # a larger batch is not decoded; a step of 256k tokens takes 2 MB
MOST_BYTES = 4 * BATCH_BYTES  # largest message; ZeroMQ disconnects the sender of a larger one
BIND_TRIES, BIND_AGAIN_S = 10, 0.05
FALLBACK = "its prefix index is corrected by its responses instead"
POOL_SHARE = 0.95  # share of the KV cache whose blocks can be known; the rest is in use


class Followers:
    """One follower for each backend that has `kv_events`. Use as a context.

    Attributes:
        translator: gets the prompts that backends have computed.
    """

    def __init__(self, config: Config, driver: Driver, backends: Backends, say: Say) -> None:
        self._first = config.backends
        self._salted = config.tenants.isolates
        self._driver = driver
        self._say = say
        self._translations = BlockTranslations(0)  # the first event has the size of a block
        self.translator = Translator(backends, self._translations, config.affinity.block_bytes, say)
        self._followers: dict[str, Follower] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._context: Any = None
        self._translating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Followers":
        """Raises InputError without pyzmq or msgspec, and for an endpoint that cannot be used."""
        try:
            for backend in self._first:
                await self.follow(backend)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks.values()]
        if self._translating is not None:
            tasks.append(self._translating)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    def reconfigure(self, config: Config) -> None:
        """Use another length of text blocks, and salts or none. `follow` does the rest."""
        self.translator.reconfigure(config.affinity.block_bytes)
        self._salted = config.tenants.isolates
        for follower in self._followers.values():
            follower.set_salted(self._salted)

    def check(self, config: Config) -> None:
        """Raises InputError if `config` needs pyzmq or msgspec and they are not installed."""
        if any(backend.kv_events for backend in config.backends):
            kv_event_modules()

    async def follow(self, config: BackendConfig) -> None:
        """Follow this backend from now on, if it has `kv_events`. Raises InputError.

        Nothing changes if it is followed at the same endpoints already.
        """
        before = self._followers.get(config.name)
        if before is not None:
            if before.endpoints == (config.kv_events, config.kv_replay):
                return
            self.leave(config.name)
        if config.kv_events is None:
            return
        zmq, msgspec = kv_event_modules()
        if self._context is None:
            try:
                self._context = zmq.asyncio.Context()
            except zmq.ZMQError as error:
                raise _unusable(config, error) from None
            run = self.translator.run()
            self._translating = asyncio.create_task(run, name="translations")
        follower = Follower(config, self._translations, self._say)
        follower.set_salted(self._salted)
        await follower.open(zmq, self._context, msgspec.msgpack.Decoder().decode)
        # Its cache is not known before the first batch, so the estimate is used until then.
        follower.attach(self._driver.shaper.backends[config.name])
        self._followers[config.name] = follower
        self._tasks[config.name] = asyncio.create_task(
            follower.run(), name=f"KV events of {config.name}"
        )

    def leave(self, name: str) -> None:
        """Stop following: the cache is estimated, and corrected by responses."""
        follower = self._followers.pop(name, None)
        if follower is None:
            return
        self._tasks.pop(name).cancel()
        follower.close()
        if not self._followers:
            self._translations.forget_size()


class Follower:
    """Follows the events of one engine."""

    def __init__(self, config: BackendConfig, translations: BlockTranslations, say: Say) -> None:
        self._config = config
        self.endpoints = config.kv_events, config.kv_replay
        self._backend: Backend | None = None
        self._say = say
        self._blocks = KvBlocks(EngineBlocks(translations))
        self._next = 0  # number of the next batch for the index
        self._last = 0  # digest of the last batch: a restarted engine has another, or none
        self._last_live = -1
        self._logged_no_salt = False

    def set_salted(self, salted: bool) -> None:
        """Set whether prompts are sent with salts from now on."""
        self._blocks.salted = salted

    def attach(self, backend: Backend) -> None:
        """Let this backend use the index."""
        self._backend = backend
        backend.cache.engine_blocks = self._blocks.held

    def close(self) -> None:
        """Detach the index and close the socket, after `run` was cancelled."""
        if self._backend is not None and self._backend.cache.engine_blocks is self._blocks.held:
            self._backend.cache.engine_blocks = None
        self._sub.close(linger=0)

    async def open(self, zmq: Any, context: Any, decode: Callable[[bytes], Any]) -> None:
        """Subscribe. Raises InputError.

        An address to bind may become free only after a moment: ZeroMQ closes in the background.
        """
        self._zmq, self._context, self._decode = zmq, context, decode
        endpoint = self._config.kv_events
        assert endpoint is not None
        try:
            self._sub = context.socket(zmq.SUB)
        except zmq.ZMQError as error:
            raise _unusable(self._config, error) from None
        self._sub.set_hwm(WAITING_BATCHES)
        self._sub.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._sub.subscribe(b"")
        tries = BIND_TRIES
        while True:
            try:
                # vLLM connects to an endpoint without a wildcard; then ours has one, and we bind.
                (self._sub.bind if "*" in endpoint else self._sub.connect)(endpoint)
                return
            except zmq.ZMQError as error:
                tries -= 1
                if error.errno != zmq.EADDRINUSE or not tries:
                    self._sub.close(linger=0)
                    raise _unusable(self._config, error) from None
            await asyncio.sleep(BIND_AGAIN_S)

    async def run(self) -> None:
        """Follow the engine until cancelled."""
        while True:
            try:
                await self._listen()
            except Exception as error:
                # If this task ended, its last index would count as exact for ever. The text of the
                # error may quote tokens.
                line = f"KV events: internal error: {type(error).__name__}; {FALLBACK}"
                self._say_here(LogEvent.INTERNAL_ERROR, line)
                self._blocks.clear(complete=False)
                await asyncio.sleep(AGAIN_S)

    async def _listen(self) -> None:
        if await self._replay() == 0 and self._next == 0:
            self._blocks.clear(complete=True)  # it has published nothing, so its cache is empty
        while True:
            if not await self._sub.poll(QUIET_S * 1e3):
                await self._replay()  # the last batch may be lost, which nothing else would show
                continue
            frames = await self._sub.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == 8:
                await self._live(int.from_bytes(frames[1], "big"), frames[2])

    async def _live(self, number: int, payload: bytes) -> None:
        """Apply a published batch. Batches arrive in order, but some may be missing."""
        if number <= self._last_live:
            self._restarted()
        elif self._last_live < 0 and number < self._next:
            await self._replay()  # replayed already, or the engine has restarted since
        self._last_live = number
        if number > self._next:
            await self._replay()
        self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> None:
        """Apply one batch to the index, unless it was replayed before."""
        if number < self._next:
            return
        self._follow_on(number)
        self._next = number + 1
        self._last = xxh3_64_intdigest(payload)
        try:
            if len(payload) > BATCH_BYTES:  # decoded it can take ten times the memory
                raise BadEvent(f"a batch of KV events has more than {BATCH_BYTES >> 20} MiB")
            batch = self._decode(payload)
            if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
                raise BadEvent("no batch of KV events")
            self._blocks.apply(batch[1])
        except (BadEvent, ValueError) as error:  # msgspec raises ValueError
            self._give_up(error)
        held = self._blocks.held
        if not held.complete and self._backend is not None and self._backend.kv_tokens < inf:
            size = held.translations.block_size or 1
            pool_blocks = int(POOL_SHARE * self._backend.kv_tokens / size)
            # The groups of a hybrid model share its pool, so a number of blocks proves nothing.
            held.pool_blocks = 0 if self._blocks.hybrid else pool_blocks

    def _follow_on(self, number: int) -> None:
        """Clear the index if the batch is the engine's first, or batches before it are missing."""
        held = self._blocks.held
        if number == 0:
            self._blocks.clear(complete=True)
        elif number > self._next:
            if held.complete or self._next:
                lost = f"KV events {self._next} to {number - 1} are lost"
                self._say_here(LogEvent.KV_EVENTS_LOST, lost)
            self._blocks.clear(complete=False)
        else:
            held.confirm()

    def _give_up(self, error: Exception) -> None:
        """Clear the index after a batch that cannot be applied."""
        no_salt = isinstance(error, NoSalt)
        if not (no_salt and self._logged_no_salt):  # every prompt raises NoSalt
            self._say_here(LogEvent.PREFIX_ESTIMATED, f"{error}; {FALLBACK}")
        self._logged_no_salt |= no_salt
        self._blocks.clear(complete=False)

    def _say_here(self, event: LogEvent, line: str) -> None:
        name = self._config.name
        self._say(event, f"backend {name}: {line}", name)

    def _restarted(self) -> None:
        line = "the engine has restarted: its prefix index starts empty"
        self._say_here(LogEvent.BACKEND_RESTARTED, line)
        self._next, self._last_live = 0, -1
        self._logged_no_salt = False  # its version may have changed

    async def _replay(self) -> int:
        """Request the batches that are missing. Returns their number, or -1 without an end.

        The last known batch is requested too. If the engine has not the same one, it has restarted,
        and its numbers may have passed ours in the meantime.
        """
        endpoint = self._config.kv_replay
        if endpoint is None:
            return -1
        count, checked = 0, self._next == 0
        try:
            with self._context.socket(self._zmq.DEALER) as dealer:
                # Ask from the last known batch on.
                dealer.setsockopt(self._zmq.MAXMSGSIZE, MOST_BYTES)
                dealer.linger = 0
                dealer.set_hwm(0)  # the whole replay must fit; the engine bounds it
                dealer.connect(endpoint)
                await dealer.send_multipart([b"", max(0, self._next - 1).to_bytes(8, "big")])
                while True:
                    async with asyncio.timeout(REPLAY_S):
                        frames = await dealer.recv_multipart()
                    if len(frames) != 4 or frames[2] == END:
                        break
                    # The first batch must be the last known batch. All later batches are new.
                    number, payload = int.from_bytes(frames[2], "big"), frames[3]
                    if not checked and number < self._next:
                        if xxh3_64_intdigest(payload) != self._last:
                            break
                        checked = True
                        continue
                    checked = True  # the last known batch is no longer kept
                    count += 1
                    self._take(number, payload)
                    await asyncio.sleep(0)  # thousands may come: let other tasks run
        except (TimeoutError, self._zmq.ZMQError):  # also without a free descriptor
            return -1
        if checked:
            return count
        # Another batch has this number: the engine has restarted. Start over.
        self._restarted()
        self._blocks.clear(complete=True)
        return await self._replay()


def _unusable(config: BackendConfig, error: Any) -> InputError:
    """Return the error for an endpoint that raised a ZMQError."""
    return InputError(f"backends.{config.name}.kv_events: {config.kv_events}: {error.strerror}")


def kv_event_modules() -> tuple[ModuleType, ModuleType]:
    """Import zmq and msgspec, which only KV events need. Raises InputError."""
    try:
        import msgspec
        import zmq.asyncio
    except ImportError as error:
        raise InputError(
            f"backends: kv_events needs {error.name}, which is not installed: "
            "pip install 'forebay[kv-events]'"
        ) from None
    return zmq, msgspec
