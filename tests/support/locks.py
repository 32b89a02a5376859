"""What requirements*.lock pin: `make locks` writes them."""

import re

from paths import ROOT

LOCKS = ("requirements.lock", "requirements-all.lock", "requirements-dev.lock")


def pinned(lock: str) -> dict[tuple[str, str], set[str]]:
    """Name and version of each package in a lock, with the SHA-256 of the archives it allows."""
    text = (ROOT / lock).read_text(encoding="utf-8")
    entries = re.findall(r"^(\S+)==(\S+)((?:.*\\\n)*.*)", text, re.MULTILINE)
    digests = r"--hash=sha256:([0-9a-f]{64})\b"
    return {(name, version): set(re.findall(digests, rest)) for name, version, rest in entries}
