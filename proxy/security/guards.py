"""Keys, cache salts and certificates of the public port: read together, replaced together.

`read` reads and checks everything and changes nothing, so a bad file has no effect.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay.proxy.api.cache_salt import CacheSalts, cache_secret
from forebay.proxy.api.response_ids import ResponseIds
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sections import UpstreamTls
from forebay.proxy.http1.tls import PublicContext, ServerTls, client_context, server_context
from forebay.proxy.identity.certificates import CertificateTenants, certificate_names
from forebay.proxy.identity.jwks import KeySet, SigningKey, is_url, read_file
from forebay.proxy.identity.jwt_tokens import JwtVerifier
from forebay.proxy.log_events import LogEvent, Say, SparseLines
from forebay.proxy.security.auth import Authenticator
from forebay.proxy.security.keys import ENVIRONMENT, SHORT_KEY, KeyRing, read_keys
from forebay.traces.ground.errors import InputError

WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class LoadedSecurity:
    """The checked contents of a configuration's files.

    Attributes:
        seen: modification stamps of the files.
        jwks: the keys that check tokens, read from a file.
    """

    config: Config
    seen: list[tuple[int, int, int] | None]
    ring: KeyRing | None
    jwks: list[SigningKey]
    certificate: PublicContext | None


class Security:
    """Holds the keys, salts and certificates in force. The constructor raises InputError."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._secret = cache_secret(environ)
        self.jwks = KeySet()
        self.auth = Authenticator()
        self.response_ids = ResponseIds(self._secret)
        loaded = _read(config, environ)
        self.tls = ServerTls(loaded.certificate) if loaded.certificate is not None else None
        self._seen = self._latest = loaded.seen
        self.take(loaded)
        # None: the system's authorities, loaded when first needed.
        link = config.upstream_tls
        plain = link == UpstreamTls()
        self.upstream_tls = None if plain else client_context(link.ca, link.verify)

    def reload(self, config: Config) -> None:
        """Read and apply keys, tenants and certificate.

        Raises InputError, and then changes nothing. The authorities for backends, and TLS on or
        off, stay as at the start.
        """
        self.take(self.read(config))

    def read(self, config: Config) -> LoadedSecurity:
        """Read and check the files that `config` names, in any thread. Raises InputError."""
        if bool(config.tls.files) != bool(self.tls):
            raise InputError("tls: cannot be switched on or off without a restart")
        before = self.auth.ring
        loaded = _read(config, self._environ, before)
        ring = loaded.ring
        if ring and before and before.ends_line and not ring.ends_line:
            raise InputError(
                f"tenants.keys: {config.tenants.keys} has no line end after its last key any more: "
                "it may be half written"
            )
        return loaded

    def take(self, loaded: LoadedSecurity) -> bool:
        """Apply the contents of the files. True if the files have changed."""
        renewed = loaded.seen != self._seen
        self._config = loaded.config
        self._use_jwks(loaded.config, loaded.jwks)
        self.auth.swap(
            loaded.ring,
            self._new_verifier(loaded.config),
            _certificates(loaded.config, loaded.certificate),
        )
        self.salts = self._new_salts(loaded.config)
        if self.tls and loaded.certificate:
            self.tls.swap(loaded.certificate)
        self._seen = loaded.seen
        return renewed

    def say_notes(self, say: Say, renewed: str = "") -> None:
        """Log facts about the keys in force, without keys. `renewed` opens the first line."""
        ring = self.auth.ring
        notes = [renewed] if renewed else []
        if ring is not None:
            notes.append(f"{len(ring)} API keys of {len(ring.tenants)} tenants")
        if self.jwks.keys:
            notes.append(f"{len(self.jwks.keys)} keys for tokens")
        if notes:
            say(LogEvent.KEYS_LOADED, "; ".join(notes))
        if ring is not None and ring.short_keys:
            say(
                LogEvent.KEYS_SHORT,
                f"{ring.short_keys} of the API keys are shorter than {SHORT_KEY} characters: "
                "they can be guessed",
            )

    def report_handshakes(self, say: Say, clock: Callable[[], float]) -> None:
        """Log once a minute that clients speak plain HTTP, or have bad certificates."""
        if self.tls is None:
            return
        lines = SparseLines()

        def failed(event: LogEvent, line: str) -> None:
            if (more := lines.more(event.label, clock())) is not None:
                say(event, f"{line}{more}")

        self.tls.context.on_plain_http = lambda: failed(
            LogEvent.PLAIN_HTTP,
            "a client speaks plain HTTP to the TLS port: its URL must begin with https://",
        )
        self.tls.on_bad_certificate = lambda why: failed(
            LogEvent.BAD_CERTIFICATE, f"a client certificate was refused: {why}"
        )

    async def watch(self, say: Say) -> None:
        """Reload whenever the files of keys or certificate change, and keep tokens' keys fresh."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.jwks.keep_fresh(say))
            while True:
                await asyncio.sleep(WATCH_S)
                await self.check_files(say)

    async def check_files(self, say: Say) -> None:
        """Reload if a file has changed since it was last read, but not since the last check.

        A file that is still changing may be half written. Reading takes long for many keys, so a
        thread does it.
        """
        config = self._config
        stamps = [file_stamp(path) for path in _files(config)]
        settled, self._latest = stamps == self._latest, stamps
        if stamps == self._seen or not settled:
            return
        try:
            loaded = await asyncio.to_thread(self.read, config)
        except InputError as error:
            self._seen = stamps  # logged once, not at every check
            say(LogEvent.KEYS_REFUSED, f"keeping the old keys and certificate: {error}")
        else:
            if config is self._config:  # else a reload came first
                self.take(loaded)
                self.say_renewed(say)

    def say_renewed(self, say: Say) -> None:
        """Log that changed files were applied."""
        self.say_notes(say, "using the new keys and certificate")

    def _use_jwks(self, config: Config, of_file: list[SigningKey]) -> None:
        source = config.tenants.jwt.jwks
        if source is not None and is_url(source):
            self.jwks.follow(source)
        else:
            self.jwks.take(of_file)

    def _new_verifier(self, config: Config) -> JwtVerifier | None:
        jwt = config.tenants.jwt
        return JwtVerifier(jwt, self.jwks) if jwt.jwks is not None else None

    def _new_salts(self, config: Config) -> CacheSalts | None:
        tenants = config.tenants
        if not tenants.isolates:
            return None
        groups = {
            name: tenant.trust_group for name, tenant in tenants.known.items() if tenant.trust_group
        }
        return CacheSalts(self._secret, groups)


def _read(
    config: Config, environ: Mapping[str, str], before: KeyRing | None = None
) -> LoadedSecurity:
    seen = [file_stamp(path) for path in _files(config)]  # first, so that no change is missed
    ring = _ring(config, environ, before)
    return LoadedSecurity(config, seen, ring, _file_keys(config), _certificate(config))


def _certificate(config: Config) -> PublicContext | None:
    """Read the certificate of the public port, if it has TLS. Raises InputError."""
    client_ca = config.tenants.client_ca
    if config.tls.files:
        return server_context(*config.tls.files, client_ca)
    if client_ca is not None:
        raise InputError("tenants.client_ca needs tls: give tls.cert and tls.key")
    return None


def _certificates(config: Config, certificate: PublicContext | None) -> CertificateTenants | None:
    if certificate is None or config.tenants.client_ca is None:
        return None
    return CertificateTenants(certificate.authorities, certificate_names(config.tenants))


def _ring(
    config: Config, environ: Mapping[str, str], before: KeyRing | None = None
) -> KeyRing | None:
    keys = config.tenants.keys
    return None if keys is None else read_keys(keys, environ, before)


def _file_keys(config: Config) -> list[SigningKey]:
    """Return the keys that check tokens, if they come from a file. Raises InputError."""
    source = config.tenants.jwt.jwks
    return [] if source is None or is_url(source) else read_file(source)


def key_holders(config: Config, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the tenants that have a key, or None if tokens name them. Raises InputError."""
    if config.tenants.jwt.jwks is not None:
        return None
    ring = _ring(config, environ)
    of_keys = ring.tenants if ring is not None else ()
    return tuple(dict.fromkeys((*of_keys, *certificate_names(config.tenants).values())))


def _files(config: Config) -> list[Path]:
    keys, jwks = config.tenants.keys, config.tenants.jwt.jwks
    paths = [Path(keys)] if keys and not keys.startswith(ENVIRONMENT) else []
    if jwks and not is_url(jwks):
        paths.append(Path(jwks))
    if config.tenants.client_ca is not None:
        paths.append(config.tenants.client_ca)
    return [*paths, *config.tls.files]


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a stamp that changes with a file, or None without a file."""
    try:
        status = path.stat()  # follows links: Kubernetes renews a secret by replacing a link
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
