"""API keys of tenants: read from a file or the environment, stored as digests only.

Each line is `tenant: key` or `tenant: sha256:HEX` (64 hex digits of the key's SHA-256). A tenant
may have several keys. `#` begins a comment line. A message about a bad line quotes its number,
never its text.
"""

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from forebay.traces.ground.errors import InputError

ENVIRONMENT = "env:"
FILE_BYTES = 16 << 20
SHORT_KEY = 16  # characters: a shorter key can be guessed
_HEAD = 8  # bytes of a digest by which keys are looked up
_ENTRY = re.compile(r"""(?P<quote>["']?)(?P<tenant>[^\s:"',]+)(?P=quote)\s*:\s+(?P<key>\S+)""")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}")  # bearer tokens of RFC 6750
_DIGEST = re.compile(r"sha256:([0-9A-Fa-f]{64})")


class KeyRing:
    """Maps keys to tenants. Immutable.

    Attributes:
        source: a digest of the file that the keys were read from.
        tenants: unique names in the order of the source; to look one up takes no search.
        short_keys: number of plain keys that are short enough to be guessed.
        ends_line: the source ends with a line end. A file that was cut within a key does not.
    """

    __slots__ = ("_by_head", "ends_line", "short_keys", "source", "tenants")

    def __init__(
        self,
        digests: Mapping[bytes, str],
        short_keys: int = 0,
        ends_line: bool = False,
        source: bytes = b"",
    ) -> None:
        by_head: dict[bytes, list[tuple[bytes, str]]] = {}
        for digest, tenant in digests.items():
            by_head.setdefault(digest[:_HEAD], []).append((digest, tenant))
        self._by_head = by_head
        self.tenants = dict.fromkeys(digests.values()).keys()
        self.short_keys = short_keys
        self.ends_line = ends_line
        self.source = source

    def __len__(self) -> int:
        return sum(map(len, self._by_head.values()))

    def tenant(self, key: str) -> str | None:
        """Return the tenant of a key, or None if it is unknown.

        The time depends on digests only, and no client can choose a digest close to a valid digest.
        """
        digest = sha256(key.encode("utf-8", "surrogateescape")).digest()
        for own_digest, tenant in self._by_head.get(digest[:_HEAD], ()):
            if compare_digest(own_digest, digest):
                return tenant
        return None


def read_keys(source: str, environ: Mapping[str, str], before: KeyRing | None = None) -> KeyRing:
    """Read the keys of `tenants.keys`, a path or `env:NAME`. Raises InputError.

    Args:
        before: keys that were read earlier. They are returned if the file is still the same.
    """
    if source.startswith(ENVIRONMENT):
        name = source.removeprefix(ENVIRONMENT)
        if name not in environ:
            raise InputError(f"tenants.keys: the environment variable {name} is not set")
        return parse_keys(environ[name], name)
    path = Path(source)
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"tenants.keys: cannot read {path} ({error.strerror})") from None
    digest = sha256(data).digest()
    if before is not None and before.source == digest:
        return before
    if len(data) > FILE_BYTES:
        raise InputError(f"tenants.keys: {path} is larger than {FILE_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"tenants.keys: {path} is not a text file") from None
    return parse_keys(text, str(path), digest)


def parse_keys(text: str, source: str, of_file: bytes = b"") -> KeyRing:
    """Parse keys, separated by line ends or commas. Raises InputError.

    Args:
        of_file: a digest of the file.
    """
    digests: dict[bytes, str] = {}
    short_keys = 0
    for number, entry in _entries(text):
        where = f"{source}:{number}"
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise InputError(
                f"{where}: give `tenant: key` or `tenant: sha256:HEX`, one key per line"
            )
        # Check the name, and turn the key into a digest.
        tenant, key = match["tenant"], match["key"]
        if key[0] in "\"'" and key[-1] == key[0]:
            key = key[1:-1]
        if not _TENANT.fullmatch(tenant):
            raise InputError(
                f"{where}: a tenant's name is 1 to 64 letters, digits, dots, dashes or underscores"
            )
        if key.startswith("sha256:"):
            hashed = _DIGEST.fullmatch(key)
            if hashed is None:
                raise InputError(f"{where}: sha256: needs 64 hexadecimal digits")
            digest = bytes.fromhex(hashed[1])
        else:
            if not _KEY.fullmatch(key):
                raise InputError(
                    f"{where}: a key is 1 to 512 letters, digits or any of . _ ~ + / = -"
                )
            short_keys += len(key) < SHORT_KEY
            digest = sha256(key.encode()).digest()
        # A key that names two tenants would count for either of them by chance.
        if digests.setdefault(digest, tenant) != tenant:
            raise InputError(f"{where}: this key already belongs to {digests[digest]}")
    if not digests:
        raise InputError(f"tenants.keys: {source} has no key; give lines `tenant: key`")
    return KeyRing(digests, short_keys, text.endswith(("\n", "\r")), of_file)


def _entries(text: str) -> Iterable[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("#"):
            for entry in line.split(","):
                if entry.strip():
                    yield number, entry.strip()
