"""Find the servers behind a name: each address of a `dns` backend is a backend of its own.

So is each rank of a server with several (`config/backends.py`).
"""

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

from forebay.proxy.config.backends import BackendConfig, lanes
from forebay.proxy.config.schema import Config
from forebay.proxy.http1.client.dns_cache import HostName
from forebay.proxy.log_events import LogEvent, Say

LOOK_UP_S = 5.0  # longest wait for an answer; a later answer counts at the next look-up


class Discovery:
    """The addresses of names, as found last.

    A name that cannot be looked up, or has no address, keeps the addresses that it had: an outage
    of the name server takes no server out. Of a name with more than `max_addresses` the first ones
    count, in a fixed order.

    Args:
        say: logs a line, once for each name that has too many.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._cut: set[str] = set()  # names of which the log says that they have too many
        self._names: dict[str, HostName] = {}
        self._found: dict[str, tuple[str, ...]] = {}

    async def look_up(self, config: Config) -> None:
        """Look all names up, at the same time."""
        hosts = {_host(backend) for backend in config.backends if backend.dns}
        await asyncio.gather(*(self._look_up(host) for host in hosts))
        # Others stay: a configuration that is not taken may name fewer.
        self._found |= {host: tuple(sorted(self._names[host].known)) for host in hosts}

    def expand(self, config: Config) -> Config:
        """Return the configuration with a backend for each address that was found and each rank."""
        if not any(backend.dns or backend.data_parallel > 1 for backend in config.backends):
            return config
        of = {
            backend.name: [lane for server in self._servers(backend) for lane in lanes(server)]
            for backend in config.backends
        }
        buckets = []
        for bucket in config.buckets:
            names: list[str] = []
            for name in bucket.backends:  # a name without a server stays: no names means all
                names += [server.name for server in of[name]] or [name]
            buckets.append(bucket.model_copy(update={"backends": tuple(names)}))
        servers = tuple(server for backend in config.backends for server in of[backend.name])
        return config.model_copy(update={"backends": servers, "buckets": tuple(buckets)})

    async def _look_up(self, host: str) -> None:
        name = self._names.get(host)
        if name is None:
            name = self._names[host] = HostName(host, asyncio.get_running_loop())
        with suppress(OSError, UnicodeError, TimeoutError):
            async with asyncio.timeout(LOOK_UP_S):
                await name.addresses()

    def _servers(self, backend: BackendConfig) -> list[BackendConfig]:
        if not backend.dns:
            return [backend]
        parts, host = urlsplit(backend.url), _host(backend)
        addresses, most = self._found.get(host, ()), backend.max_addresses
        if len(addresses) > most and host not in self._cut:
            self._cut.add(host)
            line = (
                f"{host} has {len(addresses)} addresses: the first {most} are used "
                "(backends[].max_addresses)"
            )
            self._say(LogEvent.ADDRESSES_CUT, line, backend.name)
        rest = (f":{parts.port}" if parts.port else "") + parts.path
        return [
            backend.model_copy(
                update={
                    "name": f"{backend.name}-{address.replace(':', '-')}",
                    "url": f"http://{f'[{address}]' if ':' in address else address}{rest}",
                    "dns": False,
                }
            )
            for address in addresses[:most]
        ]


def _host(backend: BackendConfig) -> str:
    host = urlsplit(backend.url).hostname
    assert host is not None  # checked when the configuration was read
    return host
