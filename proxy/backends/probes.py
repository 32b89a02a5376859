"""Probe the backends: GET `health.path` at an interval, their models and KV size now and then.

/v1/models lists their models. /metrics gives the size of the KV cache, once.

`core/health.py` decides how a probe affects new work. A backend that is not up yet is not an error:
this is logged once, and the backend is used when it comes up.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from math import inf

from forebay.proxy.backends.link import BackendLink
from forebay.proxy.backends.models import LearnedEntry, listed_models
from forebay.proxy.backends.salt_support import (
    OPENAPI,
    Salting,
    paths_of_version,
    paths_without_salt,
)
from forebay.proxy.config.backends import rank_of
from forebay.proxy.config.paths import MODELS
from forebay.proxy.config.schema import Config
from forebay.proxy.core.health import SILENT, Health
from forebay.proxy.http1.client.backend_errors import (
    AnswerTooLarge,
    LocalShortage,
    LostConnection,
    NameFault,
    TlsFault,
    UpstreamFault,
)
from forebay.proxy.http1.client.client import read_all
from forebay.proxy.http1.client.patience import Patience
from forebay.proxy.http1.client.shared_gets import SharedGets
from forebay.proxy.log_events import LogEvent, Say
from forebay.traces.ground.sse import read_object

METRICS_BYTES = 4 << 20
SIZE_RETRY_S = 30.0  # until a backend that did not report its KV cache size is asked again
MODELS_EVERY_S = 30.0  # between two questions for the models: adapters are loaded at run time
NEVER_TELLS = (401, 403, 404)  # no key, or no such path: not asked again before it is up again
LATE = "no health answer"
ASLEEP = "vLLM's sleep mode"
INTERNAL = "internal error"
SHORT = "this proxy has no descriptor, port or memory left for a connection"
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')


@dataclass(slots=True)
class _Logged:
    """Problems of one backend that were logged, so that each is logged once."""

    problem: bool = False
    short: bool = False
    faults: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Prober:
    """Probes each backend in a task of its own.

    Attributes:
        health: gets the outcome of each probe.
        clock: the time of the event loop.
        say: logs a line.
        after_probe: called after each probe.
        size_known: called when a backend that is up has been asked for its KV cache size; the
            second argument is True if it reported a size.
        models_known: called when a backend has other models than before.
        salts_known: called when it is known on which paths a backend drops salts.
        tasks: the task of each backend, by its name.
    """

    config: Config
    health: Health
    clock: Callable[[], float]
    say: Say
    after_probe: Callable[[BackendLink], None]
    size_known: Callable[[BackendLink, bool], None]
    models_known: Callable[[BackendLink], None]
    salts_known: Callable[[BackendLink], None]
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _shared: SharedGets = field(default_factory=SharedGets)  # by the lanes of one server

    def start(self, link: BackendLink) -> None:
        self.tasks[link.name] = asyncio.create_task(self._run(link))

    def stop(self, name: str) -> None:
        self.tasks.pop(name).cancel()

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        await self._shared.close()

    async def check(self, link: BackendLink) -> str | None:
        """Probe the backend once. Returns the problem, or None if it is healthy.

        A healthy backend is also asked for its KV cache size and its models when that is due.
        """
        try:
            problem = await self._ask_health(link)
            comes_up = self.health.state(link.name) in SILENT  # perhaps with another size
            now = self.clock()
            questions = (
                (link.may_sleep, self._ask_asleep),
                (now >= link.ask_size_at, self._ask_size),
                (now >= link.ask_models_at, self.ask_models),
                (now >= link.ask_salts_at, self._ask_salts),
            )
            for due, ask in questions:
                if problem is None and (due or comes_up):
                    problem = await ask(link)
        except Exception as error:  # our own fault must not end the probes
            return f"{INTERNAL}: {type(error).__name__}"
        return problem

    async def finds_dead(self, link: BackendLink) -> bool:
        """Ask for its health now. True if it refuses the connection, or says that it is not well.

        Requests that fail together share an answer. No answer in time proves nothing.
        """
        path = self.config.health.path
        try:
            status, _ = await self._shared.get(
                (link.config.url, path), lambda: self._get(link, path)
            )
        except (TimeoutError, LocalShortage):
            return False
        except UpstreamFault:
            return True
        return not _is_good(status)

    async def _run(self, link: BackendLink) -> None:
        logged, loop = _Logged(), asyncio.get_running_loop()
        while True:
            try:
                await self._probe(link, logged)
            except Exception as error:  # our own fault must not end the probes
                self._say_fault(link, logged, f"{INTERNAL}: {type(error).__name__}")
            link.probed.set()  # even then: a start or a reload waits for it
            link.poke.clear()
            next_probe = loop.call_later(self.config.health.interval, link.poke.set)
            try:
                await link.poke.wait()
            finally:
                next_probe.cancel()

    async def _probe(self, link: BackendLink, logged: _Logged) -> None:
        link.heard = False
        problem = await self.check(link)
        now = self.clock()
        if problem is None:
            self.health.probe_passed(link.name, now)
        elif problem == SHORT:  # this proves nothing about the backend
            if not logged.short:
                self._say_unprobed(link, SHORT)
        elif problem == ASLEEP:
            self.health.fell_asleep(link.name, now)
        # While a backend sends responses, a late /health only proves that it is busy.
        elif not (link.heard and problem.startswith(LATE)):
            self.health.probe_failed(link.name, problem, now)
            if problem.startswith(INTERNAL):
                self._say_fault(link, logged, problem)
            elif not link.up and not logged.problem:
                line = f"is unreachable ({problem}); it will be used once it answers"
                name = link.name
                self.say(LogEvent.BACKEND_UNREACHABLE, f"backend {name} {line}", name)
        logged.short = problem == SHORT
        logged.problem = logged.problem or not (logged.short or problem is None)
        link.probed.set()
        self.after_probe(link)

    def _say_fault(self, link: BackendLink, logged: _Logged, fault: str) -> None:
        if fault not in logged.faults:
            logged.faults.add(fault)
            self._say_unprobed(link, fault)

    def _say_unprobed(self, link: BackendLink, why: str) -> None:
        name = link.name
        self.say(LogEvent.BACKEND_UNPROBED, f"backend {name} cannot be probed: {why}", name)

    async def _ask_health(self, link: BackendLink) -> str | None:
        try:
            status, _ = await self.get(link, self.config.health.path)
        except TimeoutError:
            return f"{LATE} within {self.config.health.timeout:g} s"
        except TlsFault as fault:
            return f"TLS: {fault}"
        except NameFault:
            return "no address for its name"
        except LocalShortage:
            return SHORT
        except UpstreamFault:
            return "no connection"
        return None if _is_good(status) else f"health {status}"

    async def _ask_asleep(self, link: BackendLink) -> str | None:
        """Ask whether vLLM sleeps: its /health is good, and it answers no request."""
        try:
            status, body = await self.get(link, "/is_sleeping")
        except (TimeoutError, UpstreamFault):
            return None
        link.may_sleep = status not in NEVER_TELLS
        fields = read_object(body) if status == 200 else None
        return ASLEEP if fields and fields.get("is_sleeping") is True else None

    async def get(self, link: BackendLink, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises UpstreamFault, TimeoutError.

        The lanes of one server share an answer.
        """
        if rank_of(link.config) is None:
            return await self._get(link, path)
        return await self._shared.get((link.config.url, path), lambda: self._get(link, path))

    async def _get(self, link: BackendLink, path: str) -> tuple[int, bytes]:
        with Patience(self.config.health.timeout):
            try:
                response = await link.origin.ask("GET", path)
            except LostConnection as lost:
                if not lost.stale:
                    raise
                response = await link.origin.ask("GET", path, fresh=True)
            with closing(response):
                return response.status, await read_all(response, METRICS_BYTES)

    async def _ask_size(self, link: BackendLink) -> str | None:
        """Learn the KV cache size. A backend that does not report it is asked again later.

        Returns the problem of a lane whose rank the server does not have, or None.
        """
        rank = rank_of(link.config)
        asks = self.config.affinity.kv_tokens == "auto" or rank is not None
        engines = await self._engines(link) if asks else []
        if rank is not None and 0 < len(engines) <= rank:
            return f"its server has {len(engines)} of {link.config.data_parallel} ranks"
        self._compare_ranks(link, len(engines))
        labels = engines[rank or 0] if engines else {}
        link.prefix_caching = labels.get(b"enable_prefix_caching") != b"False"
        reported = _kv_tokens(labels)
        configured = self.config.affinity.kv_tokens  # again: a reload may have come in between
        size = reported if configured == "auto" else float(configured)
        if size is None:  # the known size stands: a restart seldom changes it
            link.ask_size_at = self.clock() + SIZE_RETRY_S
        else:
            link.kv_tokens, link.ask_size_at = size, inf
        if link.up:
            self.size_known(link, size is not None)
        return None

    def _compare_ranks(self, link: BackendLink, has: int) -> None:
        """Say that a server has more ranks than are configured: the others get no work."""
        ranks = link.config.data_parallel
        if has > ranks and not rank_of(link.config):
            line = f"its server has {has} data-parallel ranks: set data_parallel: {has}"
            self.say(LogEvent.CONFIG_CONTRADICTS, f"backend {link.name}: {line}")

    async def ask_models(self, link: BackendLink) -> None:
        """Learn the models of a backend. If it does not list them, the known models stay."""
        if link.config.models:
            return
        link.ask_models_at = self.clock() + MODELS_EVERY_S
        try:
            status, body = await self.get(link, MODELS)
        except (TimeoutError, UpstreamFault):
            return
        if status in NEVER_TELLS:
            link.ask_models_at = inf
        models = listed_models(body) if status == 200 else None
        if models is None or link.config.models:  # a reload may have come in between
            return
        before = link.models or {}
        learned = {name: entry for name, entry in before.items() if isinstance(entry, LearnedEntry)}
        models = {**models, **{k: entry for k, entry in learned.items() if k not in models}}
        changed = link.models is None or models.keys() != link.models.keys()
        link.replace_models(models)
        if changed:
            self.models_known(link)

    async def _ask_salts(self, link: BackendLink) -> None:
        """Learn on which paths the salt of a tenant's cache is dropped, if caches are isolated."""
        if not self.config.tenants.isolates:
            return
        link.ask_salts_at = self.clock() + SIZE_RETRY_S
        salting: Salting | None = None
        for path, read in ((OPENAPI, paths_without_salt), ("/version", paths_of_version)):
            try:
                status, body = await self.get(link, path)
            except AnswerTooLarge:
                continue
            except (TimeoutError, UpstreamFault):
                return
            if status == 200:
                salting = read(body)
            elif status not in NEVER_TELLS:
                return
            if salting is not None:
                break
        link.ask_salts_at = inf
        before, link.salting = link.salting, salting or Salting()
        if link.salting != before:
            self.salts_known(link)

    async def _engines(self, link: BackendLink) -> list[Mapping[bytes, bytes]]:
        """Return the labels of each engine's KV cache from vLLM's metrics, in order of ranks."""
        try:
            status, text = await self.get(link, "/metrics")
        except (TimeoutError, UpstreamFault):
            return []
        if status != 200 and link.ask_size_at == -inf:  # said once
            why = f"its /metrics answers {status}, so the size of its KV cache is unknown"
            self._say_unprobed(link, why)
        engines: dict[float, Mapping[bytes, bytes]] = {}
        for line in _CACHE_CONFIG.finditer(text):
            labels = dict(_LABEL.findall(line.group(1)))
            engines.setdefault(_count(labels, b"engine") or 0, labels)
        return [engines[rank] for rank in sorted(engines)]


def _kv_tokens(labels: Mapping[bytes, bytes]) -> float | None:
    """Return the size of an engine's KV cache in tokens, or None if its labels do not say."""
    # A hybrid model divides its blocks among groups of layers, so the product is too large.
    tokens = _count(labels, b"kv_cache_size_tokens")
    if tokens is not None:
        return tokens
    blocks, block_size = _count(labels, b"num_gpu_blocks"), _count(labels, b"block_size")
    return blocks * block_size if blocks and block_size else None


def _count(labels: Mapping[bytes, bytes], name: bytes) -> float | None:
    """Return a label as a number above 0, or None: it is "None" before the memory is profiled."""
    try:
        return float(int(labels[name])) or None
    except (KeyError, ValueError, OverflowError):
        return None


def _is_good(status: int) -> bool:
    return 200 <= status < 300
