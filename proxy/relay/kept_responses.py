"""Remember which backend keeps which response, for requests that go on from one.

A request to /v1/responses may name a `previous_response_id` instead of sending the conversation.
vLLM keeps responses in the memory of the server that made them (VLLM_ENABLE_RESPONSES_API_STORE),
so the request must go there, and its prompt is longer than its body shows.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from forebay.proxy.core.model import Request

MOST_KEPT: Final = 1_024  # a long prompt has a few hundred blocks: 10 MB


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response that a later request may go on from.

    Attributes:
        backend: the one that made it.
        tokens: of its prompt and its output.
        blocks, block_tokens: of its prompt, as in `Request`.
    """

    backend: str
    tokens: int
    blocks: tuple[int, ...]
    block_tokens: float


class KeptResponses:
    """The latest responses, by tenant and id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], KeptResponse] = OrderedDict()

    def add(self, id_: str, request: Request, backend: str, tokens: int) -> None:
        """Note a response whose prompt and output had so many tokens."""
        self._kept[request.tenant, id_] = KeptResponse(
            backend, tokens, request.blocks, request.block_tokens
        )
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def go_on(self, request: Request, previous_id: str) -> None:
        """Add to a request what it does not send: the conversation until then, and where it is."""
        request.identity ^= hash(previous_id)
        before = self._kept.get((request.tenant, previous_id))
        if before is None:  # the backend will say that it does not know it either
            return
        request.home = before.backend
        request.prompt_tokens += before.tokens
        request.blocks, request.block_tokens = before.blocks, before.block_tokens
