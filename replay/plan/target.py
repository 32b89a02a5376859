"""Read the addresses of a run's targets and its API keys, and ask the targets for their models.

A target that cannot be reached is bad input: without a server there is nothing to measure.
"""

import errno
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import yaml
from yarl import URL

from forebay.traces.ground.errors import InputError, reading

ASK_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A server. Results show `name` for answers that do not name a backend."""

    name: str
    base: str

    def url(self, path: str) -> URL:
        return URL(self.base + path)


@dataclass(frozen=True, slots=True)
class Served:
    """The model of a run and the longest context of all targets, None if unknown.

    With `own_models` each row of the trace asks for its own model. `random_weights` is True if a
    target reports a model whose answers mean nothing, like the simulated engine.
    """

    model: str
    max_model_len: int | None
    own_models: bool = False
    random_weights: bool = False


def parse_targets(urls: Sequence[str], or_else: str = "") -> tuple[Target, ...]:
    """Read `--target`, with or without a trailing `/v1` (InputError: not a URL).

    Args:
        or_else: words on the alternative to a URL, for the message.
    """
    if not urls:
        raise InputError("--target: give at least one, e.g. --target http://127.0.0.1:8080")
    bases = []
    for url in urls:
        base = url.strip().rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(base)
            port = parts.port
            URL(base)
        except ValueError as error:
            raise InputError(f"--target: {url!r} is not a URL ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise InputError(
                f"--target: {url!r} is not a URL; write e.g. http://127.0.0.1:8080{or_else}"
            )
        if parts.query or parts.fragment or parts.username is not None:
            raise InputError(f"--target: {url!r}: only scheme, host, port and path belong there")
        bases.append(base)
    names = [urlsplit(base).netloc for base in bases]
    if len(set(names)) < len(set(bases)):
        names = bases
    return tuple(Target(name, base) for name, base in zip(names, bases, strict=True))


def read_keys(path: Path) -> dict[str, str]:
    """Return the key of each tenant, from a YAML file with one `tenant: key` a line.

    Raises:
        InputError: a bad file, with no key in the message.
    """
    try:
        with reading(f"--keys {path}"):
            keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--keys {path}: is not YAML; write lines such as acme: sk-1") from error
    if not isinstance(keys, dict) or not keys:
        raise InputError(f"--keys {path}: holds no keys; write lines such as acme: sk-1")
    for tenant, key in keys.items():
        if not isinstance(tenant, str) or not isinstance(key, str) or not key.isprintable():
            raise InputError(f"--keys {path}: the key of tenant {tenant!r} is no text; quote both")
    return keys


async def ask_served(
    session: aiohttp.ClientSession,
    targets: Sequence[Target],
    model: str | None,
    row_models: Set[str | None] = frozenset(),
) -> Served:
    """Ask every target's /v1/models (InputError: a target is down, or serves another model).

    A target without a model list is accepted with `model`. Without `model`, `row_models` has the
    models that rows of the trace name, and None for rows without a model.
    """
    lengths: list[int | None] = []
    random_weights = False
    named = {name for name in row_models if name is not None} if model is None else set[str]()
    for target in dict.fromkeys(targets):
        models, aliases, without_meaning = await _models(session, target)
        random_weights |= without_meaning
        if named:
            lengths += _lengths(named, target, models)
        if not named or None in row_models:
            model = _one_model(model, target, models, aliases)
            lengths.append(models.get(model))
    limits = [length for length in lengths if length is not None]
    return Served(model or "", min(limits, default=None), bool(named), random_weights)


def _lengths(named: Set[str], target: Target, models: Mapping[str, int | None]) -> list[int | None]:
    """Return the context lengths of the models that rows name (InputError: not served)."""
    if missing := sorted(named - set(models)):
        raise InputError(
            f"--target {target.base}: rows of the trace ask for {', '.join(missing)}, it serves "
            f"{', '.join(models) or 'none that it lists'}; --model sends all rows to one model"
        )
    return [models[name] for name in named]


def _one_model(
    model: str | None, target: Target, models: Mapping[str, int | None], aliases: Set[str]
) -> str:
    """Return `model`, or the only model of the target (InputError: not served, or no choice)."""
    if not models:
        if model is None:
            raise InputError(f"--target {target.base}: lists no model; name it with --model")
        return model
    if model is None:
        own = [name for name in models if name not in aliases]
        if len(own) > 1:
            raise InputError(
                f"--target {target.base}: serves {', '.join(models)}; choose with --model"
            )
        return own[0]
    if model not in models:
        raise InputError(
            f"--model {model}: {target.base} does not serve it but {', '.join(models)}"
        )
    return model


async def _models(
    session: aiohttp.ClientSession, target: Target
) -> tuple[dict[str, int | None], set[str], bool]:
    """Return the context of each model, which are other names, and if answers mean nothing.

    There are no models if the server has no usable list.
    """
    try:
        raw = await _model_list(session, target)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
        reason = "Connection refused" if refused else str(error) or type(error).__name__
        raise InputError(
            f"--target {target.base}: cannot be reached ({reason}); "
            "start the server, or check the URL"
        ) from error
    entries = _entries(raw)
    # The root of an alias of the proxy is another name of its list.
    roots = {name: str(entry.get("root")) for name, entry in entries.items()}
    aliases = {name for name, root in roots.items() if root != name and root in entries}
    lengths = {name: _length(entry.get("max_model_len")) for name, entry in entries.items()}
    random_weights = any(entry.get("random_weights") is True for entry in entries.values())
    return lengths, aliases, random_weights


def _entries(raw: bytes) -> dict[str, dict[str, Any]]:
    """Return the usable entries of a model list by name."""
    try:
        answer: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    data = answer.get("data") if isinstance(answer, dict) else None
    sound = [entry for entry in (data if isinstance(data, list) else ()) if isinstance(entry, dict)]
    return {entry["id"]: entry for entry in sound if isinstance(entry.get("id"), str)}


def _length(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


async def _model_list(session: aiohttp.ClientSession, target: Target) -> bytes:
    """Fetch /v1/models, empty if the server does not have it or sends too much."""
    async with session.get(
        target.url("/v1/models"),
        timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S),
        allow_redirects=False,
    ) as response:
        status = response.status
        if status in (401, 403):
            raise InputError(
                f"--target {target.base}: answered {status}; give a key with --api-key"
            )
        if status >= 500:
            raise InputError(
                f"--target {target.base}: answered {status} to /v1/models; is it still loading?"
            )
        if status != 200:
            return b""
        raw = b""
        while chunk := await response.content.read(MAX_ANSWER_BYTES):
            raw += chunk
            if len(raw) > MAX_ANSWER_BYTES:
                return b""
        return raw
