"""Keys of tenants: the file that the configuration names, and the header of a client."""

from pathlib import Path


def keys_of(folder: Path, *tenants: str) -> str:
    """Write a file with a key for each tenant, and return its path."""
    path = folder / "keys"
    path.write_text("".join(f"{name}: key-of-{name}-0123456789\n" for name in tenants))
    return str(path)


def key_of(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{tenant}-0123456789"}
