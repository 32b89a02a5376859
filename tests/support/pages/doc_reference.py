"""The tables of docs/reference that are made from code: keys, codes, columns, options."""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from paths import ROOT
from pydantic import BaseModel
from result_lines import markdown_table

from forebay.proxy.config.diff import NEEDS_RESTART
from forebay.proxy.config.schema import Config
from forebay.replay.engine.vllm_versions import ENDED, RULES, SINCE, VllmRelease
from forebay.replay.results.row import Row
from forebay.replay.results.summary import METRICS
from forebay.replay.send.http.measure import DEFINITIONS
from forebay.traces.formats import formats
from forebay.traces.formats.columns import TARGETS
from forebay.traces.reading import jsonl

WHAT_TO_DO = {
    "bad_http": "correct the request's framing or target",
    "context_length_exceeded": "shorten the prompt, or raise `up_to` of the last bucket",
    "cross_site": "call the admin port from the command line, not from a web page",
    "deadline_unattainable": "retry after `Retry-After`, or give a longer timeout",
    "draining": "retry: the load balancer will choose another proxy",
    "headers_too_large": "send fewer or shorter headers, or raise `limits.header`",
    "internal_error": "report it, with the request id",
    "invalid_api_key": "send a valid key in `Authorization`, `x-api-key` or `api-key`, or a token",
    "invalid_encoding": "compress the body as its `content-encoding` says, whole",
    "invalid_json": "send valid JSON",
    "invalid_type": "correct the type that the message names",
    "method_not_allowed": "use the method in the header `Allow`",
    "model_not_found": "ask for one of the models in the message",
    "no_backend_available": "retry after `Retry-After`; the operator looks at `/status`",
    "not_found": "use one of the paths in the message",
    "overloaded": "retry after `Retry-After`; see [self-protection](../how-to/monitor.md)",
    "queue_full": "retry after `Retry-After`",
    "repeated_key": "send each key of the JSON object once",
    "request_timeout": "send the request faster, or raise `timeouts.client_body`",
    "request_too_large": "send a smaller body, or raise `limits.body`",
    "response_not_found": "create the response again: only the latest responses are remembered",
    "tenant_concurrency": "wait until one of the tenant's requests has ended",
    "tenant_quota": "retry after `Retry-After`, or raise the tenant's quota",
    "too_many_connections": "reuse connections, or raise `limits.connections`",
    "too_many_failures": "wait: this address sent many wrong keys",
    "too_many_items": "send fewer messages, content parts or values",
    "unsupported_encoding": "send the body plain, or in a coding of the header `Accept-Encoding`",
    "unsupported_value": "leave the field out: the proxy does not pass this value on",
    "unknown_parameter": "give only the parameters of the path",
    "upstream_error": "retry; the operator looks at the backend's log",
    "upstream_stream_error": "retry: the answer is not complete",
    "upstream_timeout": "retry, or raise `timeouts.first_token`",
    "uri_too_long": "send parameters in the body",
    "uuid_not_allowed": "leave `uuid` out of the message's parts",
}
"""What a client can do about each error code."""


@dataclass(frozen=True, slots=True)
class Code:
    """One error code of the proxy."""

    statuses: tuple[str, ...]
    message: str


def meanings(documented: type) -> dict[str, str]:
    """Return the `key, key: meaning` lines of a class's docstring, by key."""
    by_key: dict[str, str] = {}
    keys: list[str] = []
    text = inspect.cleandoc(inspect.getdoc(documented) or "").partition("\n\n")[2]
    for line in text.splitlines():
        entry = re.match(r"(\w+(?:, \w+)*): (.+)", line)
        if entry and set(entry[1].split(", ")) <= set(documented.__annotations__):
            keys = entry[1].split(", ")
            by_key.update(dict.fromkeys(keys, entry[2]))
        elif keys:
            by_key.update({key: f"{by_key[key]} {line.strip()}".strip() for key in keys})
    return by_key


def model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an annotation holds, itself or in a list or a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        if (model := model_of(part)) is not None:
            return model
    return None


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each section with the prefix of its keys, depth first."""

    def below(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
        yield prefix, model
        for name, field in model.model_fields.items():
            if (inner := model_of(field.annotation)) is not None:
                several = "tuple" in str(field.annotation)
                mapping = "dict" in str(field.annotation)
                yield from below(f"{prefix}{name}{'[]' if several else '.NAME' * mapping}.", inner)

    return below("", Config)


def config_keys() -> str:
    """Every key of the configuration, its default and meaning; a * needs a restart."""
    parts = []
    for prefix, model in sections():
        about = meanings(model)
        rows = [
            f"- `{prefix}{name}`{_star(prefix + name)}{_default(field)}: {_escaped(about[name])}"
            for name, field in model.model_fields.items()
            if model_of(field.annotation) is None and name != "max_imbalance"
        ]
        if not rows:
            continue
        heading = prefix.removesuffix(".") or "Single keys"
        opening = [(inspect.getdoc(model) or "").partition("\n\n")[0]] if prefix else []
        parts += [f"## {heading}", *opening, "\n".join(rows)]
    return "\n\n".join(parts)


LONGEST_LIST = 8  # of paths; the page of HTTP has more


def _default(field: Any) -> str:
    """Return the default in brackets, "" for none."""
    if field.is_required():
        return " (required)"
    value = field.get_default(call_default_factory=True)
    if value is None or value == "" or value == () or value == {}:
        return ""
    if isinstance(value, tuple) and len(value) > LONGEST_LIST:
        return " ([list](http.md#paths))"
    return f" (`{_written(value, repr(field.annotation) + repr(field.metadata))}`)"


def _written(value: Any, kind: str) -> str:
    """Write a default as in a configuration file. `kind` names the type of the key."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if "size_bytes" in kind and isinstance(value, int):
        shift, unit = next(
            size for size in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if value % (1 << size[0]) == 0
        )
        return f"{value >> shift}{unit}"
    if "seconds" in kind and isinstance(value, float):
        return f"{value:g}s" if value >= 1 or value == 0 else f"{value * 1e3:g}ms"
    return str(value)


def _star(key: str) -> str:
    """Return a star for a key that takes effect only at a restart."""
    parts = key.replace("[]", "").split(".")
    restart = parts[0] in NEEDS_RESTART or ".".join(parts[:2]) in NEEDS_RESTART
    return " \\*" if restart else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def config_schema() -> str:
    """The configuration as a JSON schema, with the meaning of each key."""
    schema = Config.model_json_schema()
    described = {model.__name__: model for _, model in sections()}
    for name, part in [("Config", schema), *schema["$defs"].items()]:
        about = meanings(described[name])
        part["description"] = (inspect.getdoc(described[name]) or "").partition("\n\n")[0]
        for key, entry in part.get("properties", {}).items():
            if key in about:
                entry["description"] = about[key]
    schema["title"] = "Forebay proxy configuration"
    return json.dumps(schema, indent=1) + "\n"


@cache
def error_codes() -> dict[str, Code]:
    """Every error code that the proxy can send, read from its source."""
    codes: dict[str, Code] = {}
    for path in sorted((ROOT / "proxy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError":
                _add_code(codes, node)
    reasons = {
        "queue_full": "429", "deadline_unattainable": "429", "tenant_quota": "429",
        "no_backend_available": "503", "context_length_exceeded": "400",
    }  # fmt: skip
    for code, status in reasons.items():
        earlier = codes.get(code)
        codes[code] = Code(tuple(sorted({status, *(earlier.statuses if earlier else ())})), "")
    codes["upstream_stream_error"] = Code(("200",), "")
    return dict(sorted(codes.items()))


def _add_code(codes: dict[str, Code], call: ast.Call) -> None:
    values = [ast.unparse(argument) for argument in call.args[:2]]
    if len(values) < 2 or not values[1].startswith("'"):
        return
    status = values[0] if values[0].isdigit() else {"load_status": "429"}.get(values[0], "400")
    code = values[1].strip("'")
    earlier = codes.get(code, Code((), ""))
    codes[code] = Code(tuple(sorted({*earlier.statuses, status})), "")


def error_table() -> str:
    """Error codes with their status and remedy."""
    rows = [
        (f"`{code}`", ", ".join(entry.statuses), WHAT_TO_DO[code])
        for code, entry in error_codes().items()
    ]
    return markdown_table(("code", "status", "what to do"), rows)


def columns() -> str:
    """The columns of requests.parquet, with type and meaning. Equal columns share a line."""
    about = meanings(Row)
    names: dict[str, list[str]] = {}
    for name, kind in Row.__annotations__.items():
        names.setdefault(f"({_kind(kind)}): {about[name]}", []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(same)} {text}" for text, same in names.items())


def _kind(annotation: Any) -> str:
    return str(getattr(annotation, "__name__", annotation)).replace(" | None", "")


def definitions() -> str:
    """The meaning of each measured quantity, as in run.json."""
    return "\n".join(f"- **{name}**: {_escaped(text)}" for name, text in DEFINITIONS.items())


def tag_table() -> str:
    """Tags of latency.hlog, and the keys of summary.json with the same figures."""
    tags = [*((tag, key) for key, tag in METRICS.items()), ("sched_lag", "schedule_lag_ms")]
    rows = [(f"`{tag}.BUCKET`", f"`{key}`") for tag, key in tags]
    return markdown_table(("tag in latency.hlog", "key in summary.json"), rows)


def trace_table() -> str:
    """The keys of a trace row, from the docstring of its reader."""
    lines = (jsonl.__doc__ or "").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    return "\n".join(["| key | type | meaning |", *rows[1:]])


def format_table() -> str:
    """Make the table of trace formats from their registry."""
    rows = [
        (f"`{trace_format.name}`", trace_format.what, trace_format.keeps)
        for trace_format in formats().values()
    ]
    return markdown_table(("format", "file", "keeps, beside times and lengths"), rows)


def target_table() -> str:
    """Make the table of the targets of `traces import --map`."""
    return markdown_table(
        ("target", "meaning"), [(f"`{name}`", what) for name, what in TARGETS.items()]
    )


def version_table() -> str:
    """The differences between vLLM versions in the simulated engine."""
    said = inspect.getdoc(VllmRelease) or ""
    rows = [(f"`--{o.replace('_', '-')}` exists", f"from {v} on") for o, v in SINCE.items()]
    for rule, version in (RULES | ENDED).items():
        match = re.search(rf"^    {rule}: (.+(?:\n {{8}}.+)*)", said, re.MULTILINE)
        assert match, rule
        meaning = " ".join(match[1].split()).rstrip(".")
        bound = f"from {version} on" if rule in RULES else f"before {version}"
        rows.append((meaning[0].upper() + meaning[1:], bound))
    return markdown_table(("what", "vLLM"), rows)
