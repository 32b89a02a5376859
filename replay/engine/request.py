"""One request inside the engine: lengths, block hashes and progress, but never its text."""

from collections.abc import Callable
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

from forebay.proxy.core.policy.engine_queue import StepRequest
from forebay.replay.engine.timing.api_server import ApiProcess

UNCAPPED = 1 << 40
"""`cap` of a request that the scheduler gives as many tokens as it can use."""
Extend = Callable[[int, int], int]
"""Return the hash of a block with output tokens from the previous block's hash and its index."""


class Content(Protocol):
    """The tokens of a request, which KV events need."""

    cache_salt: str | None

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return tokens `start`..`stop` of prompt and output."""


class EngineRequest:
    """A request and its progress.

    Attributes:
        id: unique among the requests in the engine.
        prompt_tokens: length of the prompt.
        output_target: output tokens after which it ends by itself.
        max_tokens: most output tokens, known in advance. Default: `output_target`.
        finish_reason: reason of its own end, "length" or "stop".
        hashes: chained hashes of the prompt's full blocks, extended as output fills blocks.
        arrival_s: time at which the server received it.
        queued_s: time at which the engine had it, after its time in the API server.
        priority: smaller goes first, under the priority policy only.
        content: its tokens, where the driver knows them.
        process: the process of the API server that has it. None if no server is in front.
        sink: an object of the driver's.
    """

    __slots__ = (
        "_extend",
        "aborted",
        "admitted_s",
        "arrival_s",
        "blocks",
        "cached_tokens",
        "cap",
        "computed",
        "content",
        "drafts",
        "finish_reason",
        "first_token_s",
        "hashes",
        "hit_blocks",
        "id",
        "in_flight",
        "junction",
        "last_token_s",
        "loaded_tokens",
        "lookup",
        "lookup_at",
        "max_tokens",
        "offered",
        "output_target",
        "placeholders",
        "preemptions",
        "prefilling",
        "priority",
        "process",
        "prompt_tokens",
        "queued_s",
        "registered",
        "retired",
        "room",
        "sink",
        "state_at",
        "step",
        "tables",
        "tokens",
    )

    def __init__(
        self,
        id: str,
        prompt_tokens: int,
        output_target: int,
        hashes: list[int] | None = None,
        *,
        arrival_s: float = 0.0,
        priority: int = 0,
        finish_reason: str = "length",
        max_tokens: int | None = None,
        extend: Extend | None = None,
        content: Content | None = None,
        sink: Any = None,
    ) -> None:
        # The request as its driver describes it.
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.output_target = output_target
        self.max_tokens = output_target if max_tokens is None else max_tokens
        self.hashes = [] if hashes is None else hashes
        self.arrival_s = self.queued_s = arrival_s
        self.priority = priority
        self.finish_reason = finish_reason
        self.content = content
        self.sink = sink
        self._extend = extend
        # The scheduler and the engine core change these fields. The driver sets token times.
        self.tokens = prompt_tokens  # prompt and output so far
        self.computed = 0  # tokens whose keys and values are in the KV cache
        self.placeholders = 0  # tokens that are being sampled (async scheduling only)
        self.drafts = 0  # tokens that are proposed for its next step (speculative decoding only)
        self.step: StepRequest | None = None  # as Forebay's scheduler knows it
        self.cap = UNCAPPED  # most tokens in the next step, set by that scheduler
        self.prefilling = False  # its last step left tokens to compute (set with an interval only)
        self.blocks: list[int] = []
        self.registered = 0  # leading blocks entered in the prefix cache
        self.room = 0  # tokens up to which it can decode while its blocks stay as they are
        # Models with several groups of layers: `blocks` is the table of the first group.
        self.tables: list[list[int]] = []  # a table for each group, null blocks are 0
        self.hit_blocks = 0  # blocks of the last lookup that all groups have
        self.junction = 0  # tokens of a longer prefix that some groups have, 0 without
        self.in_flight = 0  # tokens of steps that have not ended (async scheduling only)
        self.state_at = -1  # place of the state of the step before in its table
        self.retired = 0  # places in front that hold no state any more
        self.cached_tokens = -1  # prefix hit at the first admission, -1 before it
        self.loaded_tokens = 0  # of `cached_tokens`, from the host's memory
        self.offered = 0  # leading blocks of its prompt that were offered to the host's memory
        self.preemptions = 0
        self.aborted = False
        self.process: ApiProcess | None = None
        self.lookup: list[list[int]] = []  # hits of the last lookup, in each group
        self.lookup_at = -1  # the pool's change count at that lookup
        self.admitted_s = -1.0
        self.first_token_s = -1.0
        self.last_token_s = -1.0

    def __repr__(self) -> str:
        return (
            f"<Request {self.id} {self.computed}/{self.tokens} of {self.prompt_tokens}"
            f"+{self.output_target}, {len(self.blocks)} blocks>"
        )

    @property
    def output_tokens(self) -> int:
        return self.tokens - self.prompt_tokens

    @property
    def ending(self) -> bool:
        """Return True if its last token is being sampled."""
        unknown = self.placeholders
        return unknown > 0 and (self.computed + 2 - unknown >= self.prompt_tokens + self.max_tokens)

    def hash_at(self, index: int) -> int:
        """Return the chained hash of block `index`, which must be full of known tokens."""
        hashes = self.hashes
        while len(hashes) <= index:
            before = hashes[-1] if hashes else 0  # `extend` knows the salt of a first block
            hashes.append(
                self._extend(before, len(hashes))
                if self._extend
                else xxh3_64_intdigest(f"{self.id}/{len(hashes)}".encode(), before)
            )
        return hashes[index]
