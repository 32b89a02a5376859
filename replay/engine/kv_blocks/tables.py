"""Which blocks a request holds: prefix hits, allocation, registration and release.

Here all layers keep the whole context, so a request has one table of blocks. `groups` is for other
models.
"""

from forebay.replay.engine.kv_blocks.pool import BlockPool
from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.engine.request import EngineRequest


class BlockTables:
    """Allocates the blocks of requests from a pool, and finds them again by their content.

    Attributes:
        several: requests have several tables, which change in every step.
        aligns: chunks must end at the boundaries that `chunk` names.
    """

    several = False
    aligns = False

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self._limits = limits
        self._pool = pool
        self._block_size = limits.block_size
        self._caching = limits.enable_prefix_caching
        self._lookahead = limits.lookahead_tokens

    def begin_step(self) -> None:
        """Note that the planning of a step begins."""

    def chunk(self, request: EngineRequest, start: int, count: int) -> int:
        """Return the tokens of the next chunk: `count` behind `start`, or fewer."""
        return count

    def look_up(self, request: EngineRequest) -> int:
        """Return the number of leading blocks that are cached, which `take_hits` takes.

        The last token is always computed again.
        """
        if not self._caching:
            return 0
        # A head that does not fit is looked up in every step: reuse the result while it is valid.
        if request.lookup_at != self._pool.changes:
            limit = (request.tokens - 1) // self._block_size
            if limit > len(request.hashes) and request.preemptions:
                request.hash_at(limit - 1)  # a token that arrived after preemption filled a block
            self._find(request)
            request.lookup_at = self._pool.changes
        return len(request.lookup[0])

    def _find(self, request: EngineRequest) -> None:
        run = self._pool.leading_run(request.hashes, (request.tokens - 1) // self._block_size)
        if self._limits.drops_hit_block and run:
            run.pop()
        request.lookup = [run]

    def admissible(self, request: EngineRequest, end: int, spare: int) -> bool:
        """Return True if `spare` free blocks are enough for all tokens of the request.

        Without scheduler_reserve_full_isl, blocks up to `end` and for the draft are enough. Prefix
        hits in the free list count as needed, and blocks that the request holds do not.
        """
        hits = request.lookup[0] if request.lookup else []
        if self._lookahead:
            end = min(end + self._lookahead, self._limits.max_model_len)
        if self._limits.scheduler_reserve_full_isl:
            end = max(end, request.tokens)
        needed = -(-end // self._block_size) - len(hits) - len(request.blocks)
        return needed <= spare and needed + self._pool.count_free(hits) <= spare

    def take_hits(self, request: EngineRequest) -> None:
        """Let the request hold the blocks that `look_up` found."""
        hits = request.lookup[0] if request.lookup else []
        self._pool.take(hits)
        request.blocks = list(hits)
        request.registered = len(hits)
        request.lookup = []
        request.lookup_at = -1

    def extend(self, request: EngineRequest, end: int) -> bool:
        """Allocate blocks up to token `end` and register full blocks. False if too few are free."""
        blocks, block_size, pool = request.blocks, self._block_size, self._pool
        slots = end
        if self._lookahead:
            slots = min(end + self._lookahead, self._limits.max_model_len)
        missing = -(-slots // block_size) - len(blocks)
        if missing > 0:
            if missing > pool.free_blocks:
                return False
            blocks += pool.allocate(missing)
        self.register(request, min(end, request.tokens - self._limits.hash_lookahead) // block_size)
        if not self._limits.proposed_tokens:  # rejected proposals move the end back below `room`
            request.room = -(-end // block_size) * block_size - 1
        return True

    def register(self, request: EngineRequest, full: int) -> None:
        """Enter the request's first `full` blocks in the prefix cache."""
        if self._caching and full > request.registered:
            for index in range(request.registered, full):
                self._pool.register(request.blocks[index], request.hash_at(index))
            if self._pool.observer is not None:
                self._pool.observer.stored(request, request.registered, full)
            request.registered = full

    def release(self, request: EngineRequest) -> None:
        """Free all blocks of the request. Their content stays cached."""
        self._pool.release(request.blocks)
        request.blocks = []
        request.registered = request.room = 0
