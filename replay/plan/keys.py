"""Read the API keys of a trace's tenants: a YAML file with one `tenant: key` a line."""

from pathlib import Path

import yaml

from forebay.traces.ground.errors import InputError


def read_keys(path: Path) -> dict[str, str]:
    """Return the key of each tenant (InputError: a bad file, with no key in the message)."""
    try:
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--keys {path}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--keys {path}: is not YAML; write lines such as acme: sk-1") from error
    if not isinstance(keys, dict) or not keys:
        raise InputError(f"--keys {path}: holds no keys; write lines such as acme: sk-1")
    for tenant, key in keys.items():
        if not isinstance(tenant, str) or not isinstance(key, str) or not key.isprintable():
            raise InputError(f"--keys {path}: the key of tenant {tenant!r} is no text; quote both")
    return keys
