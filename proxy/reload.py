"""Apply a changed configuration while the proxy runs.

The new configuration is first read and checked as a whole, in a thread: thousands of tenants take
seconds. A bad configuration changes nothing. New backends are probed before removed backends stop
getting work, so that replacing a backend leaves no gap. Keys that need a restart are logged, and
the others are applied.
"""

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Literal

from forebay.proxy.app import App
from forebay.proxy.backends.discovery import Discovery
from forebay.proxy.config.backends import BackendConfig
from forebay.proxy.config.diff import Changes, changes
from forebay.proxy.config.schema import Config
from forebay.proxy.core.model import BackendSpec
from forebay.proxy.log_events import LogEvent, Say
from forebay.proxy.routing import live_options
from forebay.proxy.runtime import systemd
from forebay.proxy.security.guards import LoadedSecurity, file_stamp
from forebay.proxy.services import Services
from forebay.traces.ground.errors import InputError

Result = Literal["applied", "partly", "unchanged", "failed"]
RELOADS: dict[Result, LogEvent] = {
    "applied": LogEvent.RELOAD_APPLIED,
    "partly": LogEvent.RELOAD_PARTLY,
    "unchanged": LogEvent.RELOAD_UNCHANGED,
    "failed": LogEvent.RELOAD_FAILED,
}
WATCH_S = 0.5  # interval of the check of the file, which must be unchanged between two checks
LOOK_UP_EVERY_S = 5.0  # interval at which the names of `dns` backends are looked up
UNCHANGED_S = 60.0  # time in which the log says only once that a reload found nothing new
LEAVE_CHECK_S = 0.1  # interval of the check whether a removed backend is empty


class Reloader:
    """Reloads the configuration. Use it as a context around the life of the proxy.

    Attributes:
        config: the configuration in force, with a backend for each address of a `dns` backend.
        generation: number of reloads that changed something.
        say: logs a line.
        message: the result of the last reload in one line.
        restart: changed keys that need a restart.
    """

    def __init__(
        self,
        config: Config,
        services: Services,
        say: Say,
        *,
        app: App,
        discovery: Discovery,
        read: Config,
        load: Callable[[], Config] | None,
        watch: Path | None,
    ) -> None:
        """Take the configuration in force.

        Args:
            config: the configuration with a backend for each address of a `dns` backend.
            read: the configuration as it was read, with the names of `dns` backends.
            load: reads the configuration again. None if it was not read from a file.
            watch: the file whose changes cause a reload.
        """
        self.config = config
        self._read = read
        self._discovery = discovery
        self.generation = 0
        self.message = "none yet"
        self.restart: tuple[str, ...] = ()
        self._services = services
        self._app = app
        self.say = say
        self._load = load
        self._watch = watch
        self._seen = self._stamps()
        self._loaded: tuple[list[bytes], Config] = [], read  # digests of the files, and the result
        self._unchanged_at = -inf
        self._requested = asyncio.Event()
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> "Reloader":
        self._keep(asyncio.create_task(self._run()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def request(self) -> None:
        """Reload soon. For signal handlers."""
        self._requested.set()

    async def reload(self) -> Result:
        """Read the configuration again and apply it as a whole, even if the caller is cancelled.

        A client of the admin port that hangs up cancels its request, but no change may stay half
        applied.
        """
        task = asyncio.create_task(self._reload_alone(self._reload))
        self._keep(task)
        return await asyncio.shield(task)

    async def _reload_alone(
        self, change: Callable[[], Awaitable[Result]], said: str = ""
    ) -> Result:
        """Apply a change, and log its result unless it equals the message `said` before."""
        async with self._lock:
            systemd.reloading()
            try:
                result = await change()
                event = RELOADS[result]
            except Exception as error:
                # A fault of the proxy must not end the watch: the next change must be noticed.
                fault = f"internal error: {type(error).__name__}"
                self.message = f"only partly reloaded: {fault}; restart the proxy"
                result, event = "failed", LogEvent.RELOAD_BROKEN
            self._services.metrics.reloaded(result, self.generation)
            if self.message != said and not self._repeats(result):
                self.say(event, f"configuration {self.message}")
            systemd.ready(f"configuration {self.message}")
            return result

    def _repeats(self, result: Result) -> bool:
        """True if the log has reported within a minute that nothing has changed."""
        now = self._services.driver.clock()
        if result != "unchanged":
            self._unchanged_at = -inf
            return False
        repeats = now < self._unchanged_at + UNCHANGED_S
        if not repeats:
            self._unchanged_at = now
        return repeats

    async def _reload(self) -> Result:
        if self._load is None:
            self.message = "reload failed: it was not read from a file"
            return "failed"
        self._seen = self._stamps()
        try:
            read = await asyncio.to_thread(self._load_changed, self._load)
        except InputError as error:
            return self._failed(error)
        await self._discovery.look_up(read)
        return await self._change_to(read)

    def _load_changed(self, load: Callable[[], Config]) -> Config:
        """Read the configuration, in a thread. Files that are still the same are not parsed."""
        contents = [digest for path in self._watched() for digest in _digests(path)]
        if not contents or contents != self._loaded[0]:
            self._loaded = contents, load()
        return self._loaded[1]

    async def _follow_names(self) -> None:
        """Look up the names of `dns` backends, and use the servers behind them."""
        async with self._lock:
            await self._discovery.look_up(self._read)
            servers = self._discovery.expand(self._read).backends
            changed, before = servers != self.config.backends, self.message
        if changed:
            await self._reload_alone(lambda: self._change_to(self._read), said=before)

    def _failed(self, error: InputError) -> Result:
        self.message = f"reload failed, keeping the running one: {error}"
        return "failed"

    async def _change_to(self, read: Config) -> Result:
        try:
            changed, loaded = await asyncio.to_thread(self._checked, read)
        except InputError as error:
            return self._failed(error)
        self.restart, self._read = changed.restart, read
        later = f"changes to {', '.join(changed.restart)} need a restart" if changed.restart else ""
        if not changed.keys:
            self._renew_security(loaded)
            self.message = f"{later}; nothing else changed" if later else "unchanged"
            return "partly" if changed.restart else "unchanged"
        await self._apply(changed, loaded)
        self.config = changed.config
        self.generation += 1
        self.message = f"reloaded ({', '.join(changed.keys)})" + (f"; {later}" if later else "")
        return "partly" if changed.restart else "applied"

    def _checked(self, read: Config) -> tuple[Changes, LoadedSecurity]:
        """Compare and check a configuration, in a thread. Raises InputError."""
        changed = changes(self.config, self._discovery.expand(read))
        loaded = self._services.security.read(changed.config)  # even if only files have changed
        self._services.followers.check(changed.config)
        return changed, loaded

    async def _apply(self, changed: Changes, loaded: LoadedSecurity) -> None:
        services, config = self._services, changed.config
        specs = {spec.name: spec for spec in config.core_backends()}
        services.backends.reconfigure(config)
        services.followers.reconfigure(config)
        for name in changed.removed:  # a backend that replaces it may have the same endpoint
            services.followers.leave(name)
        joining = [self._join(backend, specs[backend.name]) for backend in changed.added]
        moving = [self._move(backend, specs[backend.name]) for backend in changed.moved]
        following = [self._follow(backend) for backend in changed.resized]
        tasks = []
        for change in (*joining, *moving, *following):
            tasks.append(asyncio.create_task(change))
            await asyncio.sleep(0)  # each takes a while where there are hundreds
        await asyncio.gather(*tasks)
        # No await from here on, so that no request sees half of the change.
        services.backends.models.apply(config.models)  # after new backends have listed theirs
        self._renew_security(loaded)
        services.metrics.tenant_labels.configure(config.tenants.known)
        self._app.reconfigure(config)
        services.attempts.reconfigure(config)
        services.watchdog.reconfigure(config.timeouts.idle, config.timeouts.client_write)
        public = services.port.server
        assert public is not None
        public.client_headers_s = config.timeouts.client_headers
        public.client_write_s = config.timeouts.client_write
        public.max_connections = config.max_connections()
        services.protection.reconfigure(config.limits)
        services.access.reconfigure(config.logs)
        # The policy changes last, when everything that it decides about is in place.
        resized = (
            specs
            if {"affinity.kv_tokens", "buckets"} & set(changed.keys)
            else [b.name for b in changed.resized]
        )
        for name in resized:
            self._change(specs[name])
        services.driver.change(
            lambda core, now: core.changes.reconfigure(
                config.core_buckets(), now, **live_options(config, self.say)
            )
        )
        for name in changed.removed:
            self._leave(name)
            await asyncio.sleep(0)

    def _renew_security(self, loaded: LoadedSecurity) -> None:
        if self._services.security.take(loaded):
            self._services.security.say_renewed(self.say)

    async def _join(self, backend: BackendConfig, spec: BackendSpec) -> None:
        self._services.driver.change(lambda core, now: core.changes.add_backend(spec, now))
        await self._follow(backend)
        await self._services.backends.join(backend)

    async def _move(self, backend: BackendConfig, spec: BackendSpec) -> None:
        await self._services.backends.move(backend)
        # The events of the old server no longer concern this backend.
        self._services.followers.leave(backend.name)
        self._change(spec, moved=True)
        await self._follow(backend)

    async def _follow(self, backend: BackendConfig) -> None:
        try:
            await self._services.followers.follow(backend)
        except InputError as error:  # the endpoint is taken: the rest applies
            line = f"{error}; the cache of backend {backend.name} is estimated instead"
            self.say(LogEvent.PREFIX_ESTIMATED, line, backend.name)

    def _change(self, spec: BackendSpec, moved: bool = False) -> None:
        self._services.driver.change(
            lambda core, now: core.changes.change_backend(spec, now, moved=moved)
        )

    def _leave(self, name: str) -> None:
        self._services.backends.leave(name)
        self._services.driver.change(lambda core, now: core.changes.drain_backend(name, now))
        self._keep(asyncio.create_task(self._wait_gone(name)))

    async def _wait_gone(self, name: str) -> None:
        """Forget a removed backend once nothing runs there, unless it is configured again."""
        driver = self._services.driver
        while (backend := driver.shaper.backends.get(name)) and backend.draining:
            if backend.empty:  # other proxies wait for their own requests
                self._services.backends.forget(name)
                driver.change(lambda core, now: core.changes.remove_backend(name, now))
                self.say(LogEvent.BACKEND_REMOVED, f"backend {name} is removed", name)
                return
            await asyncio.sleep(LEAVE_CHECK_S)

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """Return a stamp for each watched file that changes with it, or None without a file."""
        return [file_stamp(path) for path in self._watched()]

    def _watched(self) -> list[Path]:
        return [path for path in (self._watch, self._read.backends_file) if path is not None]

    async def _run(self) -> None:
        seen, looked_up_at = self._seen, self._services.driver.clock()
        while True:
            try:
                # `wait_for` loses a cancellation that comes at the same time as the event.
                async with asyncio.timeout(WATCH_S):
                    await self._requested.wait()
            except TimeoutError:
                if self._services.driver.clock() >= looked_up_at + LOOK_UP_EVERY_S:
                    await self._follow_names()
                    looked_up_at = self._services.driver.clock()
                before, seen = seen, self._stamps()
                # Without a file: an editor replaces it. A file that still changes is half written.
                replaced = self._watch is not None and seen[0] is None
                if replaced or seen == self._seen or seen != before:
                    continue
            self._requested.clear()
            await self.reload()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _digests(path: Path) -> list[bytes]:
    """Return a digest of a file's content, or none without a file."""
    try:
        return [sha256(path.read_bytes()).digest()]
    except OSError:
        return []
