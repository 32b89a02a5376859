"""The paths of vLLM that are shaped, and the table of paths that are passed on by default.

Two kinds of vLLM's paths are in neither. Operators' paths change or stop a server. Further paths
that generate would bypass all queues and shares: `routes` adds them for operators who know their
clients.
"""

import re
from typing import Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
SHAPED: Final = {
    CHAT: "chat",
    COMPLETIONS: "completions",
    RESPONSES: "responses",
    MESSAGES: "messages",
}
"""Paths whose requests are shaped, each with the module of `api/dialects/` that describes it."""
MODELS: Final = "/v1/models"
# GET requests, too, are answered by vLLM's API server alone, whether its engine is dead or not.
ENGINELESS: Final = (
    "/tokenize", "/detokenize", "/v1/messages/count_tokens",
    "/v1/chat/completions/render", "/v1/completions/render",
    "/v1/chat/completions/derender", "/v1/completions/derender",
)  # fmt: skip
"""Paths that vLLM's API server answers without its engine."""
ENGINE: Final = (
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score",
    "/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring",
    "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
"""Paths whose requests the engine computes."""
ROUTED: Final = (MODELS, "/version", *ENGINELESS, *ENGINE)
FORMS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Paths of vLLM whose bodies are forms. All other paths of this module take JSON."""
GENERATING: Final = (
    "/v1/chat/completions/batch", "/inference/v1/generate", "/cohere/v2/chat", "/v1/decisions",
)  # fmt: skip
"""Paths that generate, but are not shaped. They are passed on only if `routes` says so."""


def may_be_form(path: str) -> bool:
    """True if a body of this path may be a form: paths of `routes` are not known here."""
    return path in FORMS or path not in (*ROUTED, *GENERATING)


_KEPT = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")


def kept_response(path: str) -> tuple[str, str]:
    """Return the id of the response that a path names, and the method, or "" and ""."""
    match = _KEPT.fullmatch(path) if path.startswith("/v1/responses/") else None
    if match is None:
        return "", ""
    return match[1], "POST" if match[2] else "GET"
