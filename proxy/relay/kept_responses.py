"""Remember which backend keeps which response, for requests that continue a response.

A request to /v1/responses may name a `previous_response_id` instead of sending the conversation.
vLLM keeps responses in the memory of the server that made them (VLLM_ENABLE_RESPONSES_API_STORE),
so the request must go there, and its prompt is longer than its body shows. The id names the backend
(`api/response_ids.py`), unless the backend or the client has made it: those are remembered.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from forebay.proxy.core.model import Request
from forebay.proxy.http1.errors import no_such_response

MOST_KEPT: Final = 1_024  # a long prompt has a few hundred blocks: 10 MB


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response that a later request may go on from.

    Attributes:
        backend: the backend that made it.
        tokens: tokens of its prompt and its output.
        blocks, block_tokens: blocks of its prompt, as in `Request`.
    """

    backend: str
    tokens: int
    blocks: tuple[int, ...]
    block_tokens: float


class KeptResponses:
    """The latest responses of each tenant. The tenant with most of them loses its oldest."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[str, KeptResponse]] = {}
        self._count = 0

    def add(self, tenant: str, id_: str, request: Request, backend: str, tokens: int) -> None:
        """Note a response whose prompt and output had `tokens` tokens."""
        own = self._of.setdefault(tenant, OrderedDict())
        self._count += id_ not in own
        own[id_] = KeptResponse(backend, tokens, request.blocks, request.block_tokens)
        if self._count > MOST_KEPT:
            most = max(self._of, key=lambda name: len(self._of[name]))
            self._of[most].popitem(last=False)
            self._count -= 1
            if not self._of[most]:
                del self._of[most]

    def home(self, tenant: str, id_: str) -> str:
        """Return the backend that keeps a response of this tenant. Raises ApiError 404."""
        own = self._of.get(tenant)
        response = own.get(id_) if own is not None else None
        if response is None:
            raise no_such_response()
        return response.backend

    def going_on(
        self,
        tenant: str,
        request: Request,
        previous_id: str,
        *,
        owned: bool = False,
        home: str = "",
    ) -> Request:
        """Return a request completed by its kept conversation: earlier tokens, and the backend.

        Raises ApiError 404 for an id that may be another tenant's, so that no backend is asked.

        Args:
            owned: the id was made for this tenant, by this proxy or another proxy.
            home: the backend that the id names, or "".
        """
        identity = request.identity ^ hash(previous_id)
        own = self._of.get(tenant)
        before = own.get(previous_id) if own is not None else None
        if before is None:
            if tenant and not owned:
                raise no_such_response("previous_response_id")
            # The backend may know it. Else it says that it does not.
            return request.with_(identity=identity, home=home)
        return request.with_(
            identity=identity,
            home=before.backend,
            prompt_tokens=request.prompt_tokens + before.tokens,
            blocks=before.blocks,
            block_tokens=before.block_tokens,
        )
