"""Talk to the backends: one client session, health probes, who is up.

A backend that is not up yet is no error: it is said once, and it is taken in when it comes up.
"""

import asyncio
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
from aiohttp.client import _RequestContextManager as RequestContext
from yarl import URL

from forebay.proxy.config import BackendConfig, Config
from forebay.proxy.driver import Driver

FAILED_PROBES = 2  # in a row: down
FAILED_CONNECTS = 3  # in a row, by requests: down until a probe succeeds
METRICS_BYTES = 4 << 20
UPSTREAM_FAULTS = (aiohttp.ClientError, OSError)  # what a backend's misbehaviour raises
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)


@dataclass(slots=True)
class Upstream:
    """One backend as the network sees it."""

    config: BackendConfig
    up: bool = False
    failed_connects: int = 0
    poke: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def url(self) -> str:
        return self.config.url


class Backends:
    """All upstreams; use as a context. `say` gets one line when one comes up or goes down."""

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
        self._probes: list[asyncio.Task[None]] = []
        self._turn = 0
        self.upstreams = {b.name: Upstream(b) for b in config.backends}
        self.session: aiohttp.ClientSession

    async def __aenter__(self) -> "Backends":
        self.session = aiohttp.ClientSession(
            # vLLM closes idle connections after 5 s: ours must go sooner, or requests race it.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3, ssl=self._tls or True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.timeouts.connect),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            read_bufsize=2**16,
        )
        self._probes = [asyncio.create_task(self._watch(u)) for u in self.upstreams.values()]
        return self

    async def __aexit__(self, *_: object) -> None:
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await self.session.close()

    @property
    def any_up(self) -> bool:
        return any(upstream.up for upstream in self.upstreams.values())

    def request(
        self, method: str, upstream: Upstream, target: str, body: bytes, headers: dict[str, str]
    ) -> RequestContext:
        """Send one request; `target` is an allowed raw path with its query.

        Redirects are not followed: they could lead anywhere.
        """
        if key := self._config.upstream_api_key:
            headers.setdefault("authorization", f"Bearer {key.get_secret_value()}")
        # `encoded`: yarl would turn /v1/%2e%2e/x into /x
        url = URL(upstream.url + target, encoded=True)
        return self.session.request(
            method, url, data=body or None, headers=headers, allow_redirects=False
        )

    def next_up(self) -> Upstream | None:
        """For requests that are not shaped: one that is up, in turn."""
        up = [upstream for upstream in self.upstreams.values() if upstream.up]
        self._turn += 1
        return up[self._turn % len(up)] if up else None

    def connected(self, name: str) -> None:
        self.upstreams[name].failed_connects = 0

    def connect_failed(self, name: str) -> None:
        """A request could not connect; the third in a row takes the backend out."""
        upstream = self.upstreams[name]
        upstream.failed_connects += 1
        if upstream.failed_connects >= FAILED_CONNECTS:
            self._down(upstream, "refuses connections")
        upstream.poke.set()  # ask its health now, not at the next tick

    async def _watch(self, upstream: Upstream) -> None:
        failed, said = 0, False
        while True:
            problem = await self._probe(upstream)
            if problem is None:
                failed = upstream.failed_connects = 0
                if not upstream.up:
                    kv_tokens = await self._kv_tokens(upstream)
                    upstream.up = True
                    size = f", KV cache of {kv_tokens:,.0f} tokens" if kv_tokens else ""
                    self._say(f"{upstream.name} is up{size}")
                    self._driver.backend_up(upstream.name, kv_tokens)
            else:
                failed += 1
                if failed >= FAILED_PROBES:
                    self._down(upstream, problem)
                if not upstream.up and not said:
                    self._say(
                        f"{upstream.name} is not up yet ({problem}); it is taken in when it is"
                    )
                said = True
            upstream.poke.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(upstream.poke.wait(), self._config.health.interval)

    def _down(self, upstream: Upstream, problem: str) -> None:
        if upstream.up:
            upstream.up = False
            self._say(f"{upstream.name} is down ({problem})")
            self._driver.backend_down(upstream.name)

    async def _probe(self, upstream: Upstream) -> str | None:
        """What is wrong with it, None if nothing is."""
        try:
            async with asyncio.timeout(self._config.health.timeout):
                async with self.session.get(
                    upstream.url + "/health", allow_redirects=False
                ) as response:
                    await response.read()
                    return None if response.status == 200 else f"health {response.status}"
        except TimeoutError:
            return f"no health answer within {self._config.health.timeout:g} s"
        except aiohttp.ClientSSLError as error:
            return f"TLS: {_tls_problem(error)}"
        except (aiohttp.ClientError, OSError):
            return "no connection"

    async def _kv_tokens(self, upstream: Upstream) -> float | None:
        """Size of its KV pool in tokens: configured, or as vLLM's metrics say; None if neither."""
        configured = self._config.affinity.kv_tokens
        if isinstance(configured, int):
            return float(configured)
        try:
            async with asyncio.timeout(self._config.health.timeout):
                async with self.session.get(
                    upstream.url + "/metrics", allow_redirects=False
                ) as response:
                    text = await read_all(response, METRICS_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        if not (found := _CACHE_CONFIG.search(text)):
            return None
        labels = dict(re.findall(rb'(\w+)="([^"]*)"', found.group(1)))
        try:
            return float(int(labels[b"num_gpu_blocks"]) * int(labels[b"block_size"]))
        except (KeyError, ValueError):
            return None


def _tls_problem(error: aiohttp.ClientSSLError) -> str:
    """OpenSSL's own words for what is wrong, without addresses."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return cause.verify_message
    return (isinstance(cause, ssl.SSLError) and cause.reason) or "the handshake failed"


async def read_all(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The whole body; raises ClientPayloadError when it is longer than `limit`."""
    parts, size = [], 0
    while part := await response.content.readany():
        size += len(part)
        if size > limit:
            raise aiohttp.ClientPayloadError(f"more than {limit} bytes")
        parts.append(part)
    return b"".join(parts)
