"""Read a configuration: options override the environment, then the file, then the defaults.

A variable is FOREBAY_ and the key in capitals, with two underscores per level and the value as
YAML: FOREBAY_LISTEN__PORT=8081, FOREBAY_BACKENDS='[{url: "http://127.0.0.1:8001"}]'.
Every error is one line that names the source of the value and what would be right.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from forebay.proxy.config.schema import Config
from forebay.proxy.telemetry.redaction import STANDS_FOR, without_user_info
from forebay.traces.errors import InputError

PREFIX = "FOREBAY_"
NOT_OURS = {  # read by other parts or by tests
    "FOREBAY_API_KEY",
    "FOREBAY_API_KEYS",  # for `tenants.keys: env:FOREBAY_API_KEYS`
    "FOREBAY_CACHE_SECRET",
    "FOREBAY_CAPTURE_SALT",
    "FOREBAY_COMPILE",  # for setup.py
    "FOREBAY_VLLM_PYTHON",
    "FOREBAY_VLLM_WORKLOADS",
}
SECRET = ("share", "upstream_api_key")  # these values are in no message


def load_config(
    path: Path | None,
    overrides: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    to_serve: bool = True,
) -> Config:
    """Return the effective configuration; raises InputError.

    Args:
        overrides: values of the options, nested as in the file.
        to_serve: at least one backend is required.
    """
    layers = [(str(path), _file(path))] if path else []
    layers += _environment(environ)
    layers.append(("command line", dict(overrides)))
    merged: dict[str, Any] = {}
    origin: dict[tuple[str, ...], str] = {}
    for name, values in layers:
        _merge(merged, values, origin, name, ())
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise InputError(_line(error, origin)) from None
    if to_serve and not config.backends:
        raise InputError("no backend: give --backend http://HOST:PORT, or `backends` in a file")
    return config


def config_yaml(config: Config) -> str:
    """Return the configuration as YAML, secrets masked."""
    shown = _masked(config.model_dump(mode="json"))
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def _masked(value: Any) -> Any:
    """Mask passwords in URLs that are not secret as a whole, such as `tracing.endpoint`."""
    if isinstance(value, dict):
        return {key: _masked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return without_user_info(value) if isinstance(value, str) else value


def _file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise InputError(f"--config {path}: {reason}") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise InputError(f"{path}{line}: {problem}; not valid YAML") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: give keys and values, such as `listen: {{port: 8080}}`")
    return values


def _environment(environ: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    layers = []
    for name, text in sorted(environ.items()):
        if name.startswith(PREFIX) and name not in NOT_OURS:
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                raise InputError(f"{name}: its value is not valid YAML") from None  # or a secret
            for key in reversed(name.removeprefix(PREFIX).lower().split("__")):
                value = {key: value}
            layers.append((name, value))
    return layers


def _merge(
    into: dict[str, Any],
    values: dict[str, Any],
    origin: dict[tuple[str, ...], str],
    name: str,
    at: tuple[str, ...],
) -> None:
    """Merge a layer: later layers override earlier ones key by key, and lists as a whole."""
    for key, value in values.items():
        path = (*at, str(key))
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, origin, name, path)
        else:
            into[key] = dict(value) if isinstance(value, dict) else value
            origin[path] = name
            if isinstance(value, dict):
                _merge(into[key], value, origin, name, path)


def _line(error: ValidationError, origin: dict[tuple[str, ...], str]) -> str:
    """Return the first problem in one line, and the number of others."""
    problems = error.errors()
    first, path, words = problems[0], problems[0]["loc"], ""
    # "auto or a number" is two problems: one with each
    if path and str(path[-1]).startswith("literal["):
        path, words = path[:-1], f"{first['ctx']['expected']} or: "
        del problems[0]
        first = problems[0]
    at = tuple(str(part) for part in path)
    where = next(
        (origin[at[:n]] for n in range(len(at), 0, -1) if at[:n] in origin), "configuration"
    )
    key = ".".join(at)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(at[-1], _keys(first["loc"][:-1]), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{where}: {key}: unknown key{hint}{more}"
    message = words + without_user_info(first["msg"].removeprefix("Value error, "))
    if first["type"] == "missing":
        return f"{where}: {key}: missing{more}"
    hidden = isinstance(first["input"], dict | list | tuple | BaseModel) or at[0] in SECRET
    given = "" if hidden else repr(_shown(first["input"]))
    return f"{where}: {f'{key}: ' if key else ''}{f'{given}: ' if given else ''}{message}{more}"


def _shown(given: Any) -> Any:
    """Mask what may be a password in a value, even if the URL has no scheme."""
    if not isinstance(given, str) or "@" not in given:
        return given
    user, _, host = given.rpartition("@")
    scheme, found, _ = user.partition("://")
    return f"{scheme + found if found else ''}{STANDS_FOR}@{host}"


def _keys(at: tuple[int | str, ...]) -> list[str]:
    """Return the known keys at a place where an unknown one was found."""
    model: Any = Config
    for part in at:
        if isinstance(part, str):
            model = model.model_fields[part].annotation
            if not (isinstance(model, type) and issubclass(model, BaseModel)):
                model = model.__args__[0]  # tuple[Section, ...]
    return list(model.model_fields)
