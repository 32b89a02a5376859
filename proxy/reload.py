"""Put a changed configuration in force while the proxy runs.

The new one is read and checked whole before anything changes; a bad one changes nothing. New
backends are asked how they are first, and only then do those that are to go stop getting work, so
that replacing one backend by another leaves no gap. What cannot change in place is said, and the
rest applies.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forebay.proxy.app import App
from forebay.proxy.backends import Backends
from forebay.proxy.config.diff import Changes, changes
from forebay.proxy.config.schema import BackendConfig, Config
from forebay.proxy.core.model import BackendSpec
from forebay.proxy.driver import Driver
from forebay.proxy.http1.server import HttpServer
from forebay.proxy.kv_events.follower import Followers
from forebay.proxy.relay.relay import Relay
from forebay.proxy.relay.timeouts import Watchdog
from forebay.proxy.runtime import systemd as notify
from forebay.proxy.runtime.load_shedding import Protection
from forebay.proxy.security.guards import LoadedSecurity, Security
from forebay.proxy.telemetry.access_log import AccessLog
from forebay.proxy.telemetry.metrics import ProxyMetrics
from forebay.traces.errors import InputError

Result = Literal["applied", "partly", "unchanged", "failed"]

LOOK_S = 1.0  # at the file
SEE_OFF_S = 0.1  # at a backend that is to go


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that holds a part of the configuration."""

    app: App
    relay: Relay
    backends: Backends
    driver: Driver
    watchdog: Watchdog
    public: HttpServer
    protection: Protection
    access: AccessLog
    metrics: ProxyMetrics
    security: Security
    followers: Followers


class Reloader:
    """Use as a context around the life of the proxy.

    Attributes:
        config: what is in force.
        generation: how many reloads have changed something.
        said: what the last reload came to, one line.
        restart: keys that a restart would change.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        say: Callable[[str], None],
        load: Callable[[], Config] | None,
        watch: Path | None,
    ) -> None:
        self.config = config
        self.generation = 0
        self.said = "none yet"
        self.restart: tuple[str, ...] = ()
        self._parts = parts
        self._say = say
        self._load = load
        self._watch = watch
        self._seen = _stamp(watch)
        self._asked = asyncio.Event()
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> "Reloader":
        self._keep(asyncio.create_task(self._run()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ask(self) -> None:
        """Reload soon; from a signal handler."""
        self._asked.set()

    async def reload(self) -> Result:
        """Read the configuration again and put it in force, whole, even if the caller leaves.

        An admin's client that hangs up cancels what it asked for; half a change must not stay.
        """
        task = asyncio.create_task(self._reload_in_turn())
        self._keep(task)
        return await asyncio.shield(task)

    async def _reload_in_turn(self) -> Result:
        async with self._lock:
            notify.reloading()
            try:
                result = await self._reload()
            except Exception as error:
                # A fault of ours: the next change of the file, or signal, must still be heard.
                self.said = f"not reloaded whole: internal error: {type(error).__name__}; restart"
                result = "failed"
            self._parts.metrics.reloaded(result, self.generation)
            self._say(f"configuration {self.said}")
            notify.ready(f"configuration {self.said}")
            return result

    async def _reload(self) -> Result:
        if self._load is None:
            self.said = "not reloaded: it does not come from a file"
            return "failed"
        self._seen = _stamp(self._watch)
        try:
            found = changes(self.config, self._load())
            guards = self._parts.security.read(found.config)  # even if only the files are new
            self._parts.followers.check(found.config)
        except InputError as error:
            self.said = f"not reloaded, the old one stays: {error}"
            return "failed"
        self.restart = found.restart
        later = f"; needs a restart: {', '.join(found.restart)}" if found.restart else ""
        if not found.keys:
            self._guard(guards)
            self.said = f"unchanged{later}"
            return "partly" if found.restart else "unchanged"
        await self._apply(found, guards)
        self.config = found.config
        self.generation += 1
        self.said = f"reloaded ({', '.join(found.keys)}){later}"
        return "partly" if found.restart else "applied"

    async def _apply(self, found: Changes, guards: LoadedSecurity) -> None:
        parts, config = self._parts, found.config
        specs = {spec.name: spec for spec in config.core_backends()}
        parts.backends.reconfigure(config)
        parts.followers.reconfigure(config)
        for name in found.removed:  # the one that comes instead may have the same endpoint
            parts.followers.leave(name)
        joining = [self._join(backend, specs[backend.name]) for backend in found.added]
        moving = [self._move(backend, specs[backend.name]) for backend in found.moved]
        following = [self._follow(backend) for backend in found.resized]
        await asyncio.gather(*joining, *moving, *following)
        # From here on in one go: no request finds half of it.
        self._guard(guards)
        parts.metrics.tenant_labels.configure(config.tenants.known)
        parts.app.reconfigure(config)
        parts.relay.reconfigure(config)
        parts.watchdog.reconfigure(config.timeouts.idle, config.timeouts.client_write)
        parts.public.client_headers_s = config.timeouts.client_headers
        parts.public.client_write_s = config.timeouts.client_write
        parts.public.max_connections = config.max_connections()
        parts.protection.reconfigure(config.limits)
        parts.access.reconfigure(config.logs)
        resized = specs if "affinity.kv_tokens" in found.keys else [b.name for b in found.resized]
        for name in resized:
            self._change(specs[name])
        parts.driver.change(
            lambda core, now: core.reconfigure(
                config.core_buckets(), now, **config.shaper_options()
            )
        )
        for name in found.removed:
            self._leave(name)

    def _guard(self, guards: LoadedSecurity) -> None:
        if self._parts.security.take(guards):
            self._say(self._parts.security.renewed())

    async def _join(self, backend: BackendConfig, spec: BackendSpec) -> None:
        self._parts.driver.change(lambda core, now: core.add_backend(spec, now))
        await self._follow(backend)
        await self._parts.backends.join(backend)

    async def _move(self, backend: BackendConfig, spec: BackendSpec) -> None:
        await self._parts.backends.move(backend)
        # What the old server tells is no longer about this backend.
        self._parts.followers.leave(backend.name)
        self._change(spec, moved=True)
        await self._follow(backend)

    async def _follow(self, backend: BackendConfig) -> None:
        try:
            await self._parts.followers.follow(backend)
        except InputError as error:  # an endpoint that is taken: the rest applies
            self._say(f"{error}; what {backend.name} holds is believed instead")

    def _change(self, spec: BackendSpec, moved: bool = False) -> None:
        self._parts.driver.change(lambda core, now: core.change_backend(spec, now, moved=moved))

    def _leave(self, name: str) -> None:
        self._parts.backends.leave(name)
        self._parts.driver.change(lambda core, now: core.drain_backend(name, now))
        self._keep(asyncio.create_task(self._see_off(name)))

    async def _see_off(self, name: str) -> None:
        """Wait until nothing runs there any more, or it has been taken back."""
        driver = self._parts.driver
        while (backend := driver.shaper.backends.get(name)) and backend.draining:
            if backend.empty:  # other proxies see their own off
                self._parts.backends.forget(name)
                driver.change(lambda core, now: core.remove_backend(name, now))
                self._say(f"{name} is gone")
                return
            await asyncio.sleep(SEE_OFF_S)

    async def _run(self) -> None:
        while True:
            try:
                # `wait_for` loses a cancellation that comes at the same time as the event.
                async with asyncio.timeout(LOOK_S):
                    await self._asked.wait()
            except TimeoutError:
                seen = _stamp(self._watch)
                if seen is None or seen == self._seen:  # also while an editor replaces it
                    continue
            self._asked.clear()
            await self.reload()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Changes when the file does; None when there is none."""
    try:
        state = path.stat() if path else None
    except OSError:
        return None
    return (state.st_mtime_ns, state.st_size, state.st_ino) if state else None
