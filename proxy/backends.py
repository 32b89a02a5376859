"""Talk to the backends: one client session, health probes, and what follows for the shaper.

Who takes work is decided in `core/health.py`; here its decisions meet sockets and the clock. A
backend that is not up yet is no error: it is said once, and it is taken in when it comes up.
"""

import asyncio
import re
import ssl
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from math import inf

from forebay.proxy.config.schema import BackendConfig, Config
from forebay.proxy.core.health import ANY, NONE, Health, Intake
from forebay.proxy.core.model import Send
from forebay.proxy.driver import Driver
from forebay.proxy.http1.client import (
    LocalShortage,
    LostConnection,
    Origin,
    TlsFault,
    UpstreamFault,
    UpstreamResponse,
)
from forebay.proxy.relay.failures import Failure

METRICS_BYTES = 4 << 20
SIZE_AGAIN_S = 30.0  # until a backend that did not say how large its KV cache is is asked again
STALE_WITHIN_S = 0.5
DECLINED_S = 10.0  # so long a backend that could not serve is not asked for what another declined
LATE = "no health answer"
OURS = "internal error"
SHORT = "this proxy has no descriptor, port or memory left for a connection"
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)


@dataclass(slots=True)
class Upstream:
    """One backend as the network sees it.

    Attributes:
        heard: it has sent something since the last probe began.
        declined_at: when it last answered that it is busy or broken; -inf once it has served since.
        kv_tokens: the size of its KV cache, as configured or as its metrics say; inf if unknown.
        ask_size_at: when its metrics are to be asked for it; inf when they have said.
    """

    config: BackendConfig
    origin: Origin
    up: bool = False
    poke: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)  # its first probe is over
    heard: bool = False
    declined_at: float = -inf
    kv_tokens: float = inf
    ask_size_at: float = -inf
    most_prefills: int = NONE

    @property
    def name(self) -> str:
        return self.config.name


@dataclass(slots=True)
class _Said:
    """What was said of the probes of one backend, so that it is said once."""

    problem: bool = False
    short: bool = False
    faults: set[str] = field(default_factory=set)


class Backends:
    """All upstreams; use as a context. `say` gets one line when one comes up or goes down.

    Attributes:
        on_hang: called while one is down, at every probe, to give up what it does not answer.
    """

    def __init__(
        self,
        config: Config,
        driver: Driver,
        say: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config
        self._tls = tls
        self._driver = driver
        self._say = say
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._turn = 0
        self.upstreams = {b.name: self._upstream(b) for b in config.backends}
        self.health = Health(self.upstreams)
        self.on_hang: Callable[[Upstream], None] = lambda _: None
        self._timer: asyncio.TimerHandle | None = None

    def _upstream(self, config: BackendConfig) -> Upstream:
        return Upstream(config, Origin(config.url, self._config.timeouts.connect, self._tls))

    def _begin_probing(self, upstream: Upstream) -> None:
        self._probes[upstream.name] = asyncio.create_task(self._watch(upstream))

    async def __aenter__(self) -> "Backends":
        for upstream in self.upstreams.values():
            self._begin_probing(upstream)
        return self

    async def __aexit__(self, *_: object) -> None:
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        for upstream in self.upstreams.values():
            upstream.origin.close()

    async def asked(self) -> None:
        """Until each backend has been asked how it is, whatever it said."""
        await asyncio.gather(*(upstream.asked.wait() for upstream in self.upstreams.values()))

    # What a reload changes (`reload.py`).

    def reconfigure(self, config: Config) -> None:
        """Timeouts, health checks, keys and KV sizes from now on; `move` and so on do the rest."""
        size, before = config.affinity.kv_tokens, self._config.affinity.kv_tokens
        self._config = config
        for upstream in self.upstreams.values():
            upstream.origin.connect_s = config.timeouts.connect
            if size != before:  # else the next pause or trial would bring the old one back
                upstream.kv_tokens = inf if size == "auto" else float(size)
                upstream.ask_size_at = -inf if size == "auto" else inf
                upstream.poke.set()  # ask now, not at the next tick

    async def join(self, config: BackendConfig) -> None:
        """Ask a new backend how it is, and go on asking; returns after the first answer."""
        upstream = self.upstreams[config.name] = self._upstream(config)
        self.health.add(config.name)
        self._begin_probing(upstream)
        await upstream.asked.wait()

    async def move(self, config: BackendConfig) -> None:
        """The backend of this name is at another URL; what runs at the old one goes on there."""
        upstream = self._upstream(config)
        problem = await self._ask(upstream)
        self._stop_probing(config.name).origin.close()
        self.upstreams[config.name] = upstream
        self.health.remove(config.name)
        self.health.add(config.name)
        if problem is None:
            self.health.probe_passed(config.name, self._driver.now)
        else:
            self._say(f"{config.name} is not up at its new address ({problem})")
            self._driver.backend_down(config.name)
        self._look()
        self._begin_probing(upstream)

    def leave(self, name: str) -> None:
        """The backend gets no new work."""
        self._stop_probing(name).up = False
        self.health.remove(name)

    def forget(self, name: str) -> None:
        """Nothing runs there any more."""
        self.upstreams.pop(name).origin.close()

    def _stop_probing(self, name: str) -> Upstream:
        self._probes.pop(name).cancel()
        return self.upstreams[name]

    @property
    def any_up(self) -> bool:
        return any(upstream.up for upstream in self.upstreams.values())

    async def open(
        self, method: str, upstream: Upstream, target: str, body: bytes, headers: dict[str, str]
    ) -> UpstreamResponse:
        """Send one request, and wait for the head of its answer; raises UpstreamFault.

        Redirects are not followed: they could lead anywhere. A backend may close a connection that
        was idle while a request is on its way on it. Then nothing is wrong with it; if there is no
        other one, it is asked again on a new connection.

        Args:
            target: an allowed raw path with its query.
        """
        if key := self._config.upstream_api_key:
            headers.setdefault("authorization", f"Bearer {key.get_secret_value()}")
        sent_at = self._driver.now
        try:
            return await upstream.origin.ask(method, target, headers, body)
        except LostConnection as lost:
            # After a while it is no race: the backend died over this very request, perhaps.
            raced = lost.stale and self._driver.now - sent_at < STALE_WITHIN_S
            if not raced or self.others_up(upstream):
                raise
        return await upstream.origin.ask(method, target, headers, body, fresh=True)

    def next_up(self, but: Upstream | None = None) -> Upstream | None:
        """For requests that are not shaped: one that takes work, in turn."""
        up = [upstream for upstream in self.upstreams.values() if upstream.up]
        others = [upstream for upstream in up if upstream is not but]
        self._turn += 1
        return others[self._turn % len(others)] if others else None

    def others_up(self, upstream: Upstream) -> bool:
        return any(other.up for other in self.upstreams.values() if other is not upstream)

    def others_willing(self, upstream: Upstream) -> bool:
        """Whether another one is up whose last word was not that it is busy or broken itself."""
        lately = self._driver.now - DECLINED_S
        others = (other for other in self.upstreams.values() if other is not upstream)
        return any(other.up and other.declined_at < lately for other in others)

    # What requests found out.

    def sent(self, send: Send, *, seen: bool) -> None:
        """The request has gone to its backend. `seen`: its first token will be."""
        predicted_s = send.predicted_ttft_s if seen else inf
        self.health.sent(send.backend, send.request.id, predicted_s, self._driver.now)

    def answered(self, name: str, request_id: str) -> None:
        """A good first byte, or a refusal that is the client's own fault."""
        if upstream := self.upstreams.get(name):
            upstream.declined_at = -inf
        self.health.answered(name, request_id, self._driver.now)
        self._tell()

    def judge(self, name: str, request_id: str, failure: Failure) -> None:
        """No good first byte came."""
        health, now = self.health, self._driver.now
        if failure.declined and (declining := self.upstreams.get(name)):
            declining.declined_at = now
        match failure.verdict:
            case "failed":
                health.failed(name, request_id, now)
            case "refused":
                health.failed(name, request_id, now, refused=True)
                if upstream := self.upstreams.get(name):  # it may have left since
                    upstream.poke.set()  # ask its health now, not at the next tick
            case "full":
                health.full(name, request_id, now, failure.retry_after_s)
            case "answered":
                health.answered(name, request_id, now)
            case "nothing":
                health.left(name, request_id)
        self._tell()

    def left(self, name: str, request_id: str) -> None:
        """The client went away before the first byte."""
        self.health.left(name, request_id)

    # What follows.

    def _tell(self) -> None:
        if self.health.moved:
            self._look()

    def _look(self, at: float = -inf) -> None:
        # The loop may fire a hair early; the core is told the time it asked for.
        now = max(at, self._driver.now)
        for intake in self.health.intakes(now):
            self._take(intake)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.health.wake_at(now)
        if at < inf:
            self._timer = asyncio.get_running_loop().call_at(at, self._look, at)

    def _take(self, intake: Intake) -> None:
        upstream = self.upstreams[intake.backend]
        was_up, upstream.up = upstream.up, intake.most_prefills != NONE
        upstream.most_prefills = intake.most_prefills
        if not upstream.up:
            self._say(f"{upstream.name} is down ({intake.why})")
            self._driver.backend_down(upstream.name, not intake.restarted)
            return
        if not was_up:
            how = "up" if intake.most_prefills == ANY else intake.why
            known = upstream.kv_tokens < inf
            size = f", KV cache of {upstream.kv_tokens:,.0f} tokens" if known else ""
            self._say(f"{upstream.name} is {how}{size}")
        self._driver.backend_up(upstream.name, upstream.kv_tokens, intake.most_prefills)

    async def _watch(self, upstream: Upstream) -> None:
        said = _Said()
        while True:
            try:
                await self._look_after(upstream, said)
            except Exception as error:  # a fault of ours: nobody else would ask from now on
                self._say_fault(upstream, said, f"{OURS}: {type(error).__name__}")
            upstream.asked.set()  # whatever happened: a start or a reload waits for it
            upstream.poke.clear()
            with suppress(TimeoutError):
                # `wait_for` loses a cancellation that comes at the same time as the event: the
                # old address of a backend that has moved would be asked for ever.
                async with asyncio.timeout(self._config.health.interval):
                    await upstream.poke.wait()

    async def _look_after(self, upstream: Upstream, said: _Said) -> None:
        """Ask it once how it is, and do what follows."""
        upstream.heard = False
        problem = await self._ask(upstream)
        if problem is None:
            self.health.probe_passed(upstream.name, self._driver.now)
        elif problem == SHORT:  # which says nothing about the backend
            if not said.short:
                self._say(f"{upstream.name} cannot be asked how it is: {SHORT}")
        # While it sends answers, a late /health only says that it is busy.
        elif not (upstream.heard and problem.startswith(LATE)):
            self.health.probe_failed(upstream.name, problem, self._driver.now)
            if problem.startswith(OURS):
                self._say_fault(upstream, said, problem)
            elif not upstream.up and not said.problem:
                self._say(f"{upstream.name} is not up yet ({problem}); it is taken in when it is")
        said.short = problem == SHORT
        said.problem = said.problem or not (said.short or problem is None)
        upstream.asked.set()
        self.health.look_for_gray(self._driver.now)
        self._look()
        if self.health.state(upstream.name) == "down":
            self.on_hang(upstream)

    def _say_fault(self, upstream: Upstream, said: _Said, fault: str) -> None:
        if fault not in said.faults:
            said.faults.add(fault)
            self._say(f"{upstream.name} cannot be asked how it is: {fault}")

    async def _ask(self, upstream: Upstream) -> str | None:
        """What is wrong with it; None if nothing is, and then its size is asked for when due."""
        try:
            problem = await self._probe(upstream)
            comes_up = self.health.state(upstream.name) == "down"  # perhaps with another size
            if problem is None and (comes_up or self._driver.now >= upstream.ask_size_at):
                await self._ask_size(upstream)
        except Exception as error:  # a fault of ours: no other word would be heard of it
            return f"{OURS}: {type(error).__name__}"
        return problem

    async def _probe(self, upstream: Upstream) -> str | None:
        """What is wrong with it, None if nothing is."""
        try:
            status, _ = await self._get(upstream, "/health")
        except TimeoutError:
            return f"{LATE} within {self._config.health.timeout:g} s"
        except TlsFault as fault:
            return f"TLS: {fault}"
        except LocalShortage:
            return SHORT
        except UpstreamFault:
            return "no connection"
        return None if status == 200 else f"health {status}"

    async def _get(self, upstream: Upstream, path: str) -> tuple[int, bytes]:
        """Status and body; raises UpstreamFault, TimeoutError."""
        async with asyncio.timeout(self._config.health.timeout):
            try:
                answer = await upstream.origin.ask("GET", path, {})
            except LostConnection as lost:
                if not lost.stale:
                    raise
                answer = await upstream.origin.ask("GET", path, {}, fresh=True)
            with closing(answer):
                return answer.status, await read_all(answer, METRICS_BYTES)

    async def _ask_size(self, upstream: Upstream) -> None:
        """Learn how large its KV cache is; one that does not say is asked again later."""
        auto = self._config.affinity.kv_tokens == "auto"
        said = await self._kv_tokens(upstream) if auto else None
        configured = self._config.affinity.kv_tokens  # a reload may have come meanwhile
        size = said if configured == "auto" else float(configured)
        if size is None:  # what was known stands: a restart seldom changes it
            upstream.ask_size_at = self._driver.now + SIZE_AGAIN_S
        else:
            upstream.kv_tokens, upstream.ask_size_at = size, inf
        if upstream.up:
            if size is not None:
                self._say(f"{upstream.name} has a KV cache of {size:,.0f} tokens")
            self._driver.backend_up(upstream.name, upstream.kv_tokens, upstream.most_prefills)

    async def _kv_tokens(self, upstream: Upstream) -> float | None:
        """Size of its KV pool in tokens as vLLM's metrics say; None if they do not."""
        try:
            _, text = await self._get(upstream, "/metrics")
        except (TimeoutError, UpstreamFault):
            return None
        if not (found := _CACHE_CONFIG.search(text)):
            return None
        labels = dict(re.findall(rb'(\w+)="([^"]*)"', found.group(1)))
        try:
            return float(int(labels[b"num_gpu_blocks"]) * int(labels[b"block_size"]))
        except (KeyError, ValueError, OverflowError):
            return None


class AnswerTooLarge(UpstreamFault):
    """More than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} bytes")
        self.limit = limit


async def read_all(
    answer: UpstreamResponse, limit: int, heard: Callable[[], None] = lambda: None
) -> bytes:
    """The whole body; raises AnswerTooLarge. `heard` is called for every part that comes."""
    if int(answer.headers.get("content-length", 0)) > limit:
        raise AnswerTooLarge(limit)
    parts, size = [], 0
    while part := await answer.read():
        heard()
        size += len(part)
        if size > limit:
            raise AnswerTooLarge(limit)
        parts.append(part)
    return b"".join(parts)
