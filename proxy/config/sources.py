"""Read a configuration: options override the environment, then the file, then the defaults.

A variable is FOREBAY_ and the key in capitals, with two underscores per level and the value as
YAML: FOREBAY_LISTEN__PORT=8081, FOREBAY_BACKENDS='[{url: "http://127.0.0.1:8001"}]'.
Every error is one line that names the source of the value and a right value.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import orjson
import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from forebay.proxy.config.schema import Config
from forebay.proxy.config.sections import UNITS
from forebay.traces.ground.command_line.plain_words import plain_words
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.redaction import STANDS_FOR, without_user_info

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
# What Kubernetes sets in every pod for a Service called forebay or forebay-NAME.
SERVICE_LINK = re.compile(
    r"FOREBAY_(?:[A-Z0-9]+_)*(?:SERVICE_(?:HOST|PORT)(?:_[A-Z0-9]+)*|PORT_\d+_(?:TCP|UDP|SCTP)"
    r"(?:_PROTO|_PORT|_ADDR)?)=.*|FOREBAY_(?:[A-Z0-9]+_)*PORT=(?:tcp|udp|sctp)://.*",
    re.DOTALL,
)
MOST_SHOWN = 10  # problems of a configuration in one line
SECRET_KEYS = ("share", "upstream_api_key")  # these values are in no message


def load_config(
    path: Path | None,
    overrides: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    to_serve: bool = True,
) -> Config:
    """Return the effective configuration. Raises InputError.

    Args:
        overrides: values of the options, nested as in the file.
        to_serve: True requires at least one backend.
    """
    layers = [(str(path), _file(path))] if path else []
    layers += _environment(environ)
    layers.append(("command line", dict(overrides)))
    merged: dict[str, Any] = {}
    origin: dict[tuple[str, ...], str] = {}
    for name, values in layers:
        _merge(merged, values, origin, name, ())
    if isinstance(more := merged.get("backends_file"), str):
        backends = merged.get("backends") or []
        if isinstance(backends, list | tuple):
            merged["backends"] = [*backends, *_listed_backends(Path(more))]
            for place in range(len(backends), len(merged["backends"])):
                origin["backends", str(place)] = more
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise InputError(_line(error, origin)) from None
    if to_serve and not config.backends and config.backends_file is None:
        raise InputError("no backend: give --backend http://HOST:PORT, or `backends` in a file")
    return config


def config_yaml(config: Config) -> str:
    """Return the configuration as YAML, secrets masked, times and sizes with their units."""
    shown = _masked(config.model_dump(mode="json", context=UNITS))
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def config_json(config: Config) -> str:
    """Return the configuration as JSON, secrets masked."""
    shown = _masked(config.model_dump(mode="json"))
    return orjson.dumps(shown, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()


def _masked(value: Any) -> Any:
    """Mask passwords in URLs that are not secret as a whole, such as `tracing.endpoint`."""
    if isinstance(value, dict):
        return {key: _masked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return without_user_info(value) if isinstance(value, str) else value


def _file(path: Path) -> dict[str, Any]:
    values = _yaml("--config", path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: give keys and values, such as `listen: {{port: 8080}}`")
    return values


class UniqueKeys(yaml.SafeLoader):
    """Rejects a key that is given twice: YAML's parsers keep the last value without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _listed_backends(path: Path) -> list[Any]:
    """Return the backends that `backends_file` lists, not checked yet."""
    values = _yaml("backends_file", path)
    if isinstance(values, dict) and values.keys() == {"backends"}:
        values = values["backends"]
    if values is None:
        raise InputError(f"{path}: empty; give [] for no backend")
    if not isinstance(values, list):
        raise InputError(
            f'{path}: give a list of backends, such as `- {{url: "http://host:8001"}}`'
        )
    return values


def _yaml(source: str, path: Path) -> Any:
    """Read a file of YAML or JSON, which `source` names. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise InputError(f"{source} {path}: {reason}") from None
    try:
        return yaml.load(text, UniqueKeys)
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise InputError(f"{path}{line}: {problem}; not valid YAML") from None


def _environment(environ: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    layers = []
    for name, text in sorted(environ.items()):
        if name.startswith(PREFIX) and name not in NOT_OURS:
            if SERVICE_LINK.fullmatch(f"{name}={text}"):
                continue
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
        path, before = (*at, str(key)), into.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            _merge(before, value, origin, name, path)
        elif isinstance(value, dict) and before is not None:
            raise InputError(f"{origin[path]}: {'.'.join(path)}: give keys and values")
        else:
            into[key] = dict(value) if isinstance(value, dict) else value
            origin[path] = name
            if isinstance(value, dict):
                _merge(into[key], value, origin, name, path)


def _line(error: ValidationError, origin: dict[tuple[str, ...], str]) -> str:
    """Return the first problems in one line, and the number of others."""
    problems, lines, last = error.errors(), [], ""
    while problems:
        first = problems.pop(0)
        path, words = first["loc"], ""
        # "auto or a number" is two problems: one with each
        if path and str(path[-1]).startswith("literal["):
            path, words = path[:-1], f"{first['ctx']['expected']} or: "
            first = problems.pop(0)
        at = tuple(str(part) for part in path)
        where = next(
            (origin[at[:n]] for n in range(len(at), 0, -1) if at[:n] in origin), "configuration"
        )
        line = _problem(first, at, words, where)
        lines.append(line if where == last else f"{where}: {line}")
        last = where
    more = f" (and {len(lines) - MOST_SHOWN} more)" if len(lines) > MOST_SHOWN else ""
    return "; ".join(lines[:MOST_SHOWN]) + more


def _problem(first: ErrorDetails, at: tuple[str, ...], words: str, where: str) -> str:
    """Return one problem: its key, the given value and a right value."""
    key = ".".join(at)
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(at[-1], _keys(first["loc"][:-1]), n=1)
        if where == PREFIX + key.upper():  # as in FOREBAY_PORT=8081 or FOREBAY_LISTEN_PORT=8081
            close = _variables(key) or close
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{key}: unknown key{hint}"
    if first["type"] == "missing":
        return f"{key}: missing"
    message = first["msg"].removeprefix("Value error, ")
    message = words + plain_words(without_user_info(message))
    hidden = isinstance(first["input"], dict | list | tuple | BaseModel) or at[0] in SECRET_KEYS
    value = "" if hidden else repr(_shown(first["input"]))
    return f"{f'{key}: ' if key else ''}{f'{value}: ' if value else ''}{message}"


def _variables(key: str) -> list[str]:
    """Return the variables for a key of a section, which was given without its section or dot."""
    variables = []
    for section, field in Config.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            name = key.removeprefix(f"{section}_")
            if name in inner.model_fields and (name != key or section == "listen"):
                variables.append(f"{PREFIX}{section}__{name}".upper())
    return variables


def _shown(value: Any) -> Any:
    """Mask a possible password in a value, even if the URL has no scheme."""
    if not isinstance(value, str) or "@" not in value:
        return value
    user, _, host = value.rpartition("@")
    scheme, mark, _ = user.partition("://")
    return f"{scheme + mark if mark else ''}{STANDS_FOR}@{host}"


def _keys(at: tuple[int | str, ...]) -> list[str]:
    """Return the known keys at a place where an unknown one was found."""
    model: Any = Config
    for part in at:
        if isinstance(model, type) and issubclass(model, BaseModel):
            model = model.model_fields[str(part)].annotation
        else:  # tuple[Section, ...], or Mapping[str, Section]
            first, second = get_args(model)
            model = first if isinstance(part, int) else second
    return list(model.model_fields)
