"""One request in the skipping engine: its input, its results and its progress."""

from typing import Final

from forebay.proxy.core.policy.engine_queue import StepRequest
from forebay.replay.engine.timing.api_server import ApiProcess
from forebay.replay.sim.engine.runs import Run

PREFILLING: Final = -1
"""`phase` of a request whose prompt is not fully computed."""
UNCAPPED: Final = 1 << 40
"""`cap` of a request that the scheduler gives as many tokens as it can use."""
ENDING: Final = -2
"""`phase` of a request that has produced its last token, before its blocks are free."""


class SimRequest:
    """A request. The driver fills the arguments, the engine everything else.

    A decoding request is not changed from step to step. At the start of step n it has
    `offset + n` tokens. It takes a new block where n % block_size == `phase`, and ends with step
    `last - offset`.

    Attributes:
        id: name for the driver.
        prompt_tokens: length of the prompt.
        output_target: output tokens after which it ends.
        ids: the trace's block ids of the prompt, prefix-chained. () when nothing is shared.
        block_tokens: tokens of a block id.
        first_token_s, finished_s: times of the first and the last token, seconds. -1.0 before.
        cached_tokens: prompt tokens hit at the first admission.
        stall_s: largest gap between two of its tokens, seconds.
        preemptions: number of its preemptions.
        loaded: prompt tokens whose keys and values another engine has computed.
        priority: lower goes first, under the engine's priority policy only.
        process: the process of the API server that has it, set by `ServedEngine`.
    """

    __slots__ = (
        "block_tokens",
        "cached_tokens",
        "cap",
        "computed",
        "finished_s",
        "first_token_s",
        "gap_from",
        "id",
        "ids",
        "last",
        "loaded",
        "offset",
        "output_target",
        "phase",
        "preemptions",
        "priority",
        "private",
        "process",
        "prompt_tokens",
        "queued_s",
        "rank",
        "runs",
        "shareable",
        "since",
        "stall_s",
        "step",
        "tokens",
    )

    # Set when the engine queues or admits the request, and read only afterwards.
    shareable: int  # leading blocks whose content `ids` define, which other requests can hit
    last: int  # computed tokens at which the request ends
    rank: int  # place in the order of admission
    offset: int
    since: int  # step that gave the last token which `stall_s` includes
    computed: int  # tokens in the KV cache, while prefilling
    runs: list[tuple[Run, int]]  # its shareable blocks: runs, and where its share of each stops

    def __init__(
        self,
        id: str,
        prompt_tokens: int,
        output_target: int,
        ids: tuple[int, ...] = (),
        block_tokens: int = 512,
    ) -> None:
        self.id = id
        # `tokens`: prompt and, after a preemption, output so far. Updated only while prefilling.
        self.prompt_tokens = self.tokens = prompt_tokens
        self.output_target = output_target
        self.ids = ids
        self.block_tokens = block_tokens
        self.first_token_s = self.finished_s = -1.0
        self.queued_s = 0.0  # time at which the engine had it
        self.step: StepRequest | None = None  # as Forebay's scheduler knows it
        self.cap = UNCAPPED  # most tokens in the planned step, set by that scheduler
        self.gap_from = -1.0  # time of the last token before a preemption
        self.stall_s = 0.0
        self.cached_tokens = self.loaded = self.preemptions = self.priority = 0
        self.phase = PREFILLING
        self.private: Run | None = None
        self.process: ApiProcess | None = None

    def __repr__(self) -> str:
        return f"<SimRequest {self.id} {self.prompt_tokens}+{self.output_target}>"
