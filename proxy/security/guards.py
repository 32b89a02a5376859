"""What guards the public port: keys, cache salts, certificate; read together, swapped together.

`read` reads and checks everything and changes nothing, so a bad file keeps what was.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay.proxy.api.cache_salt import CacheSalts, cache_secret
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sections import UpstreamTls
from forebay.proxy.http1.tls import ServerTls, client_context, server_context
from forebay.proxy.security.auth import Authenticator
from forebay.proxy.security.keys import ENVIRONMENT, SHORT_KEY, KeyRing, read_keys
from forebay.traces.errors import InputError

WATCH_S = 2.0


@dataclass(frozen=True, slots=True)
class LoadedSecurity:
    """What a configuration and its files came to, checked."""

    config: Config
    seen: list[tuple[int, int, int]]  # stamps of the files
    ring: KeyRing | None
    certificate: ssl.SSLContext | None


class Security:
    """Raises InputError when made with a configuration whose files are not right."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self._seen = _stamps(config)  # before they are read, so that no change is missed
        self._environ = environ
        self._config = config
        self._secret = cache_secret(environ)
        self.auth = Authenticator(_ring(config, environ))
        self.salts = self._new_salts(config)
        tls = config.tls
        self.tls = ServerTls(server_context(*tls.files)) if tls.files else None
        # None: aiohttp checks against the system's authorities, and loads them when first needed.
        upstream = config.upstream_tls
        plain = upstream == UpstreamTls()
        self.upstream_tls = None if plain else client_context(upstream.ca, upstream.verify)

    def reload(self, config: Config) -> None:
        """Take keys, tenants and certificate as `config` and the files now are.

        Raises InputError, with nothing changed, when something is not right. The authorities for
        backends and whether the port speaks TLS stay as they were at the start.
        """
        self.take(self.read(config))

    def read(self, config: Config) -> LoadedSecurity:
        """Read the files that `config` names; raises InputError."""
        if bool(config.tls.files) != bool(self.tls):
            raise InputError("tls: cannot be switched on or off without a restart")
        return LoadedSecurity(
            config=config,
            seen=_stamps(config),  # before they are read
            ring=_ring(config, self._environ),
            certificate=server_context(*config.tls.files) if config.tls.files else None,
        )

    def take(self, found: LoadedSecurity) -> bool:
        """Put it in force; whether the files are others than before."""
        renewed = found.seen != self._seen
        self._config = found.config
        self.auth.swap(found.ring)
        self.salts = self._new_salts(found.config)
        if self.tls and found.certificate:
            self.tls.swap(found.certificate)
        self._seen = found.seen
        return renewed

    def notes(self) -> list[str]:
        """What an operator should hear about the keys in force; never a key."""
        ring = self.auth.ring
        if ring is None:
            return []
        lines = [f"{len(ring)} API keys of {len(ring.tenants)} tenants"]
        if ring.short_keys:
            lines.append(
                f"{ring.short_keys} of the API keys are shorter than {SHORT_KEY} characters: "
                "they can be guessed"
            )
        return lines

    async def watch(self, say: Callable[[str], None]) -> None:
        """Reload when the files of keys or certificate change; for ever."""
        while True:
            await asyncio.sleep(WATCH_S)
            self.look(say)

    def look(self, say: Callable[[str], None]) -> None:
        """Reload if a file has changed since it was last read."""
        stamps = _stamps(self._config)
        if stamps == self._seen:
            return
        try:
            self.reload(self._config)
        except InputError as error:
            self._seen = stamps  # said once, not at every look
            say(f"kept the old keys and certificate: {error}")
        else:
            say(self.renewed())

    def renewed(self) -> str:
        """One line for the operator when the files have changed and were taken."""
        return "; ".join(["took the new keys and certificate", *self.notes()])

    def files(self) -> list[Path]:
        """The files that are looked at."""
        return _files(self._config)

    def _new_salts(self, config: Config) -> CacheSalts | None:
        tenants = config.tenants
        if not tenants.isolates:
            return None
        groups = {name: one.trust_group for name, one in tenants.known.items() if one.trust_group}
        return CacheSalts(self._secret, groups)


def _ring(config: Config, environ: Mapping[str, str]) -> KeyRing | None:
    keys = config.tenants.keys
    return None if keys is None else read_keys(keys, environ)


def _files(config: Config) -> list[Path]:
    keys = config.tenants.keys
    paths = [Path(keys)] if keys and not keys.startswith(ENVIRONMENT) else []
    return [*paths, *config.tls.files]


def _stamps(config: Config) -> list[tuple[int, int, int]]:
    return [_stamp(path) for path in _files(config)]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()  # through links: Kubernetes swaps a link to renew a secret
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)
