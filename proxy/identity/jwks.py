"""Read the public keys of an identity provider (JWKS, RFC 7517), and follow their rotation.

A file is read with the configuration, and again when it changes. A URL is asked at the start, every
five minutes, and when a token names an unknown key. While it cannot be read, the latest keys stay
in force.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.request import Request, urlopen

from forebay.proxy.log_events import LogEvent, Say
from forebay.traces.ground.errors import InputError

FETCH_EVERY_S: Final = 300.0
RETRY_S: Final = 10.0  # after a failure, and between two questions for unknown keys
FETCH_S: Final = 5.0
MOST_BYTES: Final = 1 << 20
MOST_KEYS: Final = 100
ALGORITHMS: Final[Mapping[str, tuple[str, ...]]] = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}
"""Signatures by type of key. No algorithm is symmetric: a key that checks must not also sign."""


Fetch = Callable[[str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key, and the algorithms whose signatures it may check."""

    key_id: str
    key: Any
    algorithms: tuple[str, ...]


def jwt_module() -> Any:
    """Import PyJWT. Raises InputError if it is missing."""
    try:
        import cryptography  # noqa: F401
        import jwt
    except ImportError:
        line = "tenants.jwt needs PyJWT: pip install 'forebay[jwt]'"
        raise InputError(line) from None
    return jwt


def is_url(source: str) -> bool:
    return "://" in source


def read_file(source: str) -> list[SigningKey]:
    """Read the keys of a file. Raises InputError."""
    try:
        with Path(source).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"tenants.jwt.jwks: cannot read {source} ({error.strerror})") from None
    return parse_jwks(data, source)


def parse_jwks(data: bytes, source: str) -> list[SigningKey]:
    """Return the keys that can check signatures. Raises InputError without any.

    Keys of other kinds are skipped, because providers also list their keys for encryption.
    """
    jwt, where = jwt_module(), f"tenants.jwt.jwks: {source}"
    if len(data) > MOST_BYTES:
        raise InputError(f"{where} is larger than {MOST_BYTES >> 20} MiB")
    try:
        entries = json.loads(data)["keys"]
        objects = [entry for entry in entries if isinstance(entry, dict)]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(f'{where} is no JWKS: give JSON such as {{"keys": [...]}}') from None
    keys = []
    for entry in objects[:MOST_KEYS]:
        algorithms = ALGORITHMS.get(str(entry.get("kty")), ())
        if named := entry.get("alg"):
            algorithms = tuple(name for name in algorithms if name == named)
        if not algorithms or entry.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK.from_dict(
                {**entry, "alg": algorithms[0]} if "crv" not in entry else entry
            )
        except (jwt.PyJWTError, ValueError, TypeError):
            continue  # a curve or a form that PyJWT does not know
        keys.append(SigningKey(str(entry.get("kid") or ""), key.key, algorithms))
    if not keys:
        raise InputError(f"{where} has no public key for signatures (RSA, EC or OKP)")
    return keys


class KeySet:
    """The keys in force.

    Attributes:
        changed: grows whenever the keys are replaced.
    """

    def __init__(self) -> None:
        self.keys: list[SigningKey] = []
        self.changed = 0
        self._url = ""
        self._trouble = ""  # why the URL could not be read the last time
        self._read = "", b""  # the URL that was read last, and its answer
        self._wanted, self._moved = asyncio.Event(), asyncio.Event()

    def take(self, keys: list[SigningKey]) -> None:
        """Use the keys of a file."""
        self._url, self._read = "", ("", b"")
        self._use(keys)

    def follow(self, url: str) -> None:
        """Use the keys of a URL. The latest keys stay until it has answered."""
        if url != self._url:
            self._url = url
            self._wanted.set()
            self._moved.set()

    def _use(self, keys: list[SigningKey]) -> None:
        self.keys = keys
        self.changed += 1

    def for_token(self, key_id: str) -> list[SigningKey]:
        """Return the keys that may have signed a token, [] for an unknown key.

        For an unknown key the URL, if there is one, is asked soon.
        """
        matches = [key for key in self.keys if not key_id or key.key_id in (key_id, "")]
        if not matches:
            self._wanted.set()
        return matches

    async def keep_fresh(self, say: Say, fetch: Fetch | None = None) -> None:
        """Ask the URL at intervals, until cancelled. `refresh` has just asked it."""
        while True:
            url_before = self._url
            every_s = RETRY_S if self._trouble else FETCH_EVERY_S
            await _until_set(self._moved, RETRY_S)  # unknown keys cause no more questions
            await _until_set(self._wanted, every_s - RETRY_S)
            if self._url or url_before:
                await self.refresh(say, fetch)

    async def refresh(self, say: Say, fetch: Fetch | None = None) -> None:
        """Fetch the keys of the URL, if there is one, and use them. Log a failure once.

        Args:
            fetch: returns the body of the URL's answer. Raises OSError.
        """
        self._wanted.clear()
        self._moved.clear()
        url, before = self._url, self._trouble
        self._trouble = await self._fetched(url, fetch or fetch_url) if url else ""
        if self._trouble and self._trouble != before:
            say(LogEvent.JWKS_UNREACHABLE, f"{self._trouble}; the keys that are known stay")

    async def _fetched(self, url: str, fetch: Fetch) -> str:
        """Fetch and use the keys of a URL. Returns why it failed, or "" after a success."""
        try:
            data = await fetch(url)
            if (url, data) == self._read:
                return ""  # so that the tokens that were checked stay known
            keys = await asyncio.to_thread(parse_jwks, data, url)
        except InputError as error:
            return str(error)
        except (OSError, HTTPException) as error:  # urllib's errors are OSErrors
            why = error.reason if isinstance(error, URLError) else error
            return f"tenants.jwt.jwks: cannot read {url} ({why})"
        if url == self._url:
            self._use(keys)
            self._read = url, data
        return ""


async def _until_set(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def fetch_url(url: str) -> bytes:
    """Return the body of a URL's answer, within FETCH_S. Raises OSError."""

    def fetched() -> bytes:
        request = Request(url, headers={"accept": "application/json"})
        with urlopen(request, timeout=FETCH_S) as response:
            data: bytes = response.read(MOST_BYTES + 1)
        return data

    return await asyncio.to_thread(fetched)
