"""The APIs whose requests are shaped, one file each. vLLM serves all of them.

In reading order: base (the differences between APIs), chat, completions, responses (OpenAI's),
messages (Anthropic's), usage (tokens that a response reports), special_work (more than a prefill),
continuation (an answer that goes on at another backend).
A new API is another file, with its object `DIALECT`, and a line of `SHAPED` in config.paths.

May import the modules of api that read fields and text. The relay and the app ask a dialect, and
name no dialect.
"""

from importlib import import_module
from typing import Any, Final

from forebay.proxy.api.dialects.base import Dialect
from forebay.proxy.config import paths

__all__ = ["CHAT", "COMPLETIONS", "DIALECTS", "MESSAGES", "RESPONSES", "Dialect"]


def _described(path: str, module: str) -> Dialect:
    dialect: Dialect = import_module(f"{__name__}.{module}").DIALECT
    dialect.path = path
    return dialect


DIALECTS: Final = {path: _described(path, module) for path, module in paths.SHAPED.items()}
CHAT: Final = DIALECTS[paths.CHAT]
COMPLETIONS: Final = DIALECTS[paths.COMPLETIONS]
RESPONSES: Final = DIALECTS[paths.RESPONSES]
MESSAGES: Final = DIALECTS[paths.MESSAGES]


def dialect_of(fields: dict[str, Any]) -> Dialect:
    """Return the first API whose field of messages the body has, else completions."""
    with_messages = (d for d in DIALECTS.values() if d.has_parts and d.prompt_field in fields)
    return next(with_messages, COMPLETIONS)


def types_errors(path: str, prefix: str) -> bool:
    """True if the JSON of errors on this path has a type.

    Args:
        prefix: precedes all paths as clients see them.
    """
    return any(d.types_errors and path.startswith(prefix + d.path) for d in DIALECTS.values())
