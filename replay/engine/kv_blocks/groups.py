"""Block tables of a model whose layers need different parts of the context.

vLLM divides such layers into groups of equally many layers. A request has a table of blocks for
each group, and all take their blocks from one pool. A prefix hit is the longest that all groups
have. Layers with a window or a recurrent state give back blocks that they no longer need, so their
tables begin with null blocks.

The prefix cache keeps every full block of layers with the whole context. Of the others it keeps
blocks at places from which a later request may continue: the end of the prompt, and the point at
which a shared prefix was seen to end (vLLM's default, prefix_cache_retention_interval 0).

The rules come from vLLM 0.32 and 0.33: `kv_cache_coordinator.py`,
`single_type_kv_cache_manager.py` and `Scheduler._mamba_block_aligned_split`.
"""

import math
from collections.abc import Iterable

from forebay.replay.engine.hardware.kv_layout import WHOLE, KvGroup
from forebay.replay.engine.kv_blocks.chunk_ends import ChunkEnds, prefill_end
from forebay.replay.engine.kv_blocks.kinds import StateKind, WholeKind, kind_of
from forebay.replay.engine.kv_blocks.pool import BlockPool
from forebay.replay.engine.kv_blocks.tables import BlockTables
from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.engine.request import EngineRequest


def tables_of(limits: SchedulerLimits, pool: BlockPool) -> BlockTables:
    """Return the tables for the groups of layers in `limits`."""
    return (BlockTables if limits.groups == (WHOLE,) else GroupTables)(limits, pool)


class GroupTables(BlockTables):
    """The tables of requests with several groups of layers.

    With recurrent states in the prefix cache, chunks end where a state can be kept. A state that
    was cached in this step can be hit in the next at the earliest.
    """

    several = True

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        super().__init__(limits, pool)
        # Groups with the same needs are one kind. The look-up begins with the whole context.
        members: dict[KvGroup, list[int]] = {}
        for number, group in enumerate(limits.groups):
            members.setdefault(group, []).append(number)
        self._kinds = [kind_of(*pair, limits, pool) for pair in members.items()]
        self._kinds.sort(key=lambda kind: type(kind) is not WholeKind)
        self._kind_of = [
            next(kind for kind in self._kinds if number in kind.members)
            for number in range(len(limits.groups))
        ]
        self._alignment = math.lcm(*(group.blocks for group in limits.groups))
        self._one_pass = len(self._kinds) == 2 and type(self._kinds[0]) is WholeKind
        # Recurrent states.
        self.aligns = any(type(kind) is StateKind for kind in self._kinds)
        self._chunk_ends = ChunkEnds(limits)
        self._fresh: set[int] = set()  # states that were cached in this step

    def begin_step(self) -> None:
        self._fresh.clear()

    def chunk(self, request: EngineRequest, start: int, count: int) -> int:
        if not self.aligns:
            return count
        prompt, tokens = request.prompt_tokens, request.tokens
        return self._chunk_ends.chunk(prompt, tokens, start, count, request.junction)

    def _exports_state(self, request: EngineRequest, start: int, end: int, upto: int) -> bool:
        return self._chunk_ends.exports_state(_prefill_end(request), start, end, upto)

    def look_up(self, request: EngineRequest) -> int:
        super().look_up(request)
        return request.hit_blocks

    def _find(self, request: EngineRequest) -> None:
        request.lookup = [[] for _ in self._kind_of]
        hits, longest = self._longest_hit(request.hashes, request.tokens - 1)
        for kind, rows in hits.items():
            for member, row in zip(kind.members, rows, strict=True):
                request.lookup[member] = row
        sizes = [kind.per_block for kind in self._kind_of]
        hit = min(len(row) * size for row, size in zip(request.lookup, sizes, strict=True))
        request.hit_blocks = hit
        for row, size in zip(request.lookup, sizes, strict=True):
            del row[hit // size :]
        request.junction = longest if longest > hit * self._block_size else 0

    def _longest_hit(
        self, hashes: list[int], most: int
    ) -> tuple[dict[WholeKind, list[list[int]]], int]:
        """Return the blocks of the longest hit of all groups, and the tokens of any kind's longest.

        The hit has at most `most` tokens, which need not be whole blocks. Each kind shortens the
        hit of the kinds before it, until none does.
        """
        if len(self._kind_of) == 1:
            kind = self._kinds[0]
            return {kind: kind.find(hashes, most)}, 0
        rows_of: dict[WholeKind, list[list[int]]] = {}
        hit, longest = most, 0
        while True:
            length = hit
            for kind in self._kinds:
                if kind in rows_of and type(kind) is WholeKind:
                    length = min(length, len(rows_of[kind][0]) * kind.block_size)
                    continue
                rows_of[kind] = kind.find(hashes, length)
                length = len(rows_of[kind][0]) * kind.block_size
                longest = max(longest, length)
            if length >= hit or self._one_pass:
                return rows_of, longest
            hit = length

    def admissible(self, request: EngineRequest, end: int, spare: int) -> bool:
        for kind in self._kinds if request.hit_blocks else ():
            if type(kind) is StateKind:
                for member in kind.members:
                    if self._pool.hash_of(request.lookup[member][-1]) in self._fresh:
                        return False
        longest = self._limits.max_model_len
        if self._limits.scheduler_reserve_full_isl:
            whole = min(request.tokens, longest)
            if self._needed(request, whole, whole, capped=True) > spare:
                return False
        slots = min(end + self._lookahead, longest)
        return self._needed(request, end, slots, capped=False) <= spare

    def _needed(self, request: EngineRequest, end: int, slots: int, *, capped: bool) -> int:
        """Return the free blocks that a request needs for its first `end` tokens.

        Args:
            slots: tokens with proposals of the draft.
            capped: count blocks that it holds at once, and not all that its chunks take in turn.
        """
        needed, tables = 0, request.tables
        start = request.computed if tables else request.hit_blocks * self._block_size
        for number, kind in enumerate(self._kind_of):
            row = request.lookup[number] if request.lookup else []
            held = len(row) + (len(tables[number]) if tables else 0)
            if type(kind) is StateKind:
                skipped = 0
                most = 1 + self._exports_state(request, start, end, end)
                missing = min(kind.blocks(end) - held, most)
            else:
                skipped = kind.skipped(start)
                missing = kind.most_blocks(slots) if capped else kind.blocks(slots)
                missing -= max(skipped, held)
            needed += max(0, missing)
            needed += self._pool.count_free(block for block in row[skipped:] if block)
        return needed

    def take_hits(self, request: EngineRequest) -> None:
        hit = request.hit_blocks
        for number, kind in enumerate(self._kind_of):
            row = request.lookup[number] if request.lookup else []
            skipped = kind.skipped(hit * self._block_size)
            table = [0] * skipped + row[skipped:]
            self._pool.take(block for block in table if block)
            request.tables.append(table)
        request.blocks = request.tables[0]
        request.registered = hit
        request.lookup = []
        request.lookup_at = -1

    def extend(self, request: EngineRequest, end: int) -> bool:
        self._give_back(request)
        slots = min(end + self._lookahead, self._limits.max_model_len)
        if self._needed(request, end, slots, capped=False) > self._pool.free_blocks:
            return False
        exports = self._exports_state(request, request.computed, end, end)
        for number, kind in enumerate(self._kind_of):
            table = request.tables[number]
            if type(kind) is StateKind:
                self._write_state(request, table, kind.blocks(end), exports)
            else:
                table += self._pool.allocate(max(0, kind.blocks(slots) - len(table)))
        full = min(end, request.tokens - self._limits.hash_lookahead) // self._block_size
        self.register(request, full)
        if self._limits.recaches_boundary and self.aligns and not exports:
            self._recache(request, full)
        if not self.aligns and not self._limits.proposed_tokens:
            request.room = min(
                kind.room(end, kind.skipped(self._settled(request))) for kind in self._kinds
            )
        return True

    def _write_state(
        self, request: EngineRequest, table: list[int], blocks: int, exports: bool
    ) -> None:
        """Allocate the block that a step writes its state to, behind null blocks."""
        if blocks <= len(table):
            return
        request.state_at = len(table) - 1
        table += [0] * (blocks - 1 - exports - len(table))
        table += self._pool.allocate(blocks - len(table))

    def _give_back(self, request: EngineRequest) -> None:
        """Free the blocks that neither a step in flight nor a later step needs."""
        tokens, retired = self._settled(request), request.retired
        for number, kind in enumerate(self._kind_of):
            table = request.tables[number]
            stop = min(kind.skipped(tokens), len(table))
            if type(kind) is StateKind:
                self._free(table, range(request.retired, stop))
                retired = max(retired, stop)
                if 0 <= request.state_at < kind.blocks(tokens) - 1:
                    self._free(table, (request.state_at,))
                continue
            first = stop
            while first and table[first - 1]:
                first -= 1
            self._free(table, range(first, stop))
        request.retired = retired

    def _settled(self, request: EngineRequest) -> int:
        """Return the computed tokens of steps that have ended."""
        return max(0, request.computed - request.in_flight)

    def _free(self, table: list[int], places: Iterable[int]) -> None:
        """Free the blocks at `places` of a table and leave null blocks there."""
        freed = [place for place in places if table[place]]
        self._pool.release([table[place] for place in freed])
        for place in freed:
            table[place] = 0

    def register(self, request: EngineRequest, full: int) -> None:
        full -= full % self._alignment
        if not self._caching or full <= request.registered:
            return
        ends = self._ends(request)
        for number, kind in enumerate(self._kind_of):
            table, size = request.tables[number], kind.per_block
            for index in range(request.registered // size, full // size):
                if table[index] and kind.keeps(index, ends):
                    key = kind.key(request.hash_at((index + 1) * size - 1), number)
                    self._pool.register(table[index], key)
                    if type(kind) is StateKind:
                        self._fresh.add(key)
        request.registered = full

    def _recache(self, request: EngineRequest, full: int) -> None:
        """Count the state at the end of a prompt's blocks as cached in this step, as vLLM 0.32."""
        if full != (request.prompt_tokens - 1) // self._block_size or not full:
            return
        for number, kind in enumerate(self._kind_of):
            if type(kind) is StateKind and (block := request.tables[number][full - 1]):
                key = kind.key(request.hash_at(full - 1), number)
                self._pool.register(block, key)
                self._fresh.add(key)

    def _ends(self, request: EngineRequest) -> list[int]:
        """Return the tokens behind which later requests may continue."""
        end, junction = request.prompt_tokens - 1, request.junction
        return [end, junction] if junction else [end]

    def release(self, request: EngineRequest) -> None:
        for table in request.tables:
            self._pool.release([block for block in table if block])
        request.tables, request.blocks = [], []
        request.registered = request.retired = request.room = 0
        request.state_at = -1


def _prefill_end(request: EngineRequest) -> int:
    return prefill_end(request.prompt_tokens, request.tokens)
