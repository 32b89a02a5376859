"""KV-cache blocks in runs: what `engine.kv_cache.BlockPool` does, at a cost per run of blocks.

Two facts make it exact. Uncached free blocks always lie in front of the cached ones (they are
freed to the front, and only handing out a block uncaches it), so a number stands for them. And a
request lets go of its tail before its head, so what is cached never has a gap: a prefix tree
tells all that can be hit.
"""

from forebay.replay.sim.runs import Node, Run, agreed, last_piece, pieces


class RunPool:
    """The blocks of one engine: free list and prefix tree.

    Attributes:
        free: free blocks. To hand some out, the least valuable ones, is to lower this number.
            What that evicts is worked out (`settle`) before somebody looks at the cache or frees
            blocks to the front of the list; it can wait while blocks are freed to the other end.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free = num_blocks - 1  # block 0 is the null block
        self._blank = self.free  # the uncached ones at the front of the list
        self._listed = self.free  # all in the list; more than `free` are handed out
        self._block_size = block_size
        self._roots: dict[int, Node] = {}  # by block_tokens
        # The cached part of the free list: a ring of runs, each from its end to its start.
        self._ring = ring = Run(0, 0, None, 1)
        ring.before = ring.after = ring
        self._spent = ring  # the run at the back, when it is private blocks of ended requests

    def hold_back(self, count: int) -> None:
        """Do not hand out `count` of the uncached blocks; negative: do so again."""
        self.settle()
        self._blank -= count
        self._listed -= count
        self.free -= count

    def settle(self) -> None:
        """Take what was handed out off the list: uncached blocks first, then by eviction."""
        blank = self._blank - (self._listed - self.free)
        self._listed = self.free
        if blank < 0:
            self._blank = 0
            self._evict(-blank)
        else:
            self._blank = blank

    def lookup(
        self, ids: tuple[int, ...], block_tokens: int, limit: int
    ) -> tuple[int, int, list[Node]]:
        """Leading blocks that are cached, at most `limit`: how many, how many of them are free,
        and the nodes they are in."""
        if self._listed > self.free:
            self.settle()
        hits = free = 0
        path: list[Node] = []
        node = self._roots.get(block_tokens)
        per_id = block_tokens // self._block_size
        while node is not None and hits < limit:
            node = node.children.get(ids[hits // per_id])
            if node is None:
                break
            start, hits = hits, agreed(node, ids, limit)
            path.append(node)
            if not node.copies[0].holders:
                free += hits - start
            if hits < node.stop:
                break
        return hits, free, path

    def take(self, path: list[Node], hits: int, free: int) -> list[tuple[Run, int]]:
        """Hold what `lookup` found, for one more request; the list is what `release` wants."""
        self.free -= free
        self._listed -= free
        held = []
        for node in path:
            if hits < node.stop:
                self._split(node, hits)
            run = node.copies[0]
            if not run.holders:
                run.before.after, run.after.before = run.after, run.before
            run.holders += 1
            held.append((run, node.stop))
        return held

    def take_private(self, run: Run) -> None:
        """Give a preempted request the private blocks back that are still cached; settled."""
        self.free -= run.stop - run.start
        self._listed -= run.stop - run.start
        run.before.after, run.after.before = run.after, run.before

    def register(
        self, held: list[tuple[Run, int]], ids: tuple[int, ...], block_tokens: int, stop: int
    ) -> None:
        """Let later prompts hit blocks up to `stop` of the request that holds `held`.

        They are allocated already. As long as nobody shares the end of what the request holds,
        its last run just grows; so a long prefill makes one run, not one a chunk.
        """
        if self._listed > self.free:
            self.settle()
        per_id = block_tokens // self._block_size
        if held:
            first, start = held[-1]
            run = last_piece(first, start)
            node = run.node
            assert node is not None
            if run.holders == 1 and not node.children and len(node.copies) == 1:
                run.stop = node.stop = stop
                node.ids = ids  # may know more of the prompt than the request that came before
                held[-1] = (first, stop)
                return
        else:
            start = 0
            root = self._roots.get(block_tokens)
            if root is None:
                root = self._roots[block_tokens] = Node(None, (0,), per_id, 0, 0)
            node = root
        while start < stop:
            key = ids[start // per_id]
            child = node.children.get(key)
            if child is None:
                child = Node(node, ids, per_id, start, stop)
                if node.children:
                    node.children[key] = child
                else:
                    node.children = {key: child}
            else:  # somebody else registered the same content first: a second copy
                same = agreed(child, ids, stop)
                if same < child.stop:
                    self._split(child, same)
            run = Run(start, child.stop, child, 1)
            child.copies.append(run)
            held.append((run, child.stop))
            start, node = child.stop, child

    def release(self, held: list[tuple[Run, int]], private: int, uncached: int) -> None:
        """Let go of `held`, and of so many private and uncached blocks behind it, for good."""
        if uncached:
            self.release_uncached(uncached)
        if private > 0:
            ring, spent = self._ring, self._spent
            if spent is ring.before and spent is not ring:
                spent.stop += private
            else:
                self._spent = spent = Run(0, private, None, 0)
                self._append(spent)
            self.free += private
            self._listed += private
        for first, stop in reversed(held):
            if first.stop == stop and first.holders == 1:
                first.holders = 0
                self._append(first)
                blocks = stop - first.start
                self.free += blocks
                self._listed += blocks
            else:
                self._release_pieces(first, stop)

    def release_for_now(
        self, held: list[tuple[Run, int]], start: int, private: int, uncached: int
    ) -> Run | None:
        """The same for a preempted request: the run of its private blocks, which start at block
        `start` and which it may still find."""
        run = None
        if private > 0:
            run = Run(start, start + private, None, 0)
            self._append(run)
            self.free += private
            self._listed += private
        self.release(held, 0, uncached)
        return run

    def release_uncached(self, count: int) -> None:
        """Take back blocks that were never registered."""
        if self._listed > self.free:
            self.settle()
        self.free += count
        self._listed += count
        self._blank += count

    def _release_pieces(self, first: Run, stop: int) -> None:
        for run in reversed(pieces(first, stop)):
            run.holders -= 1
            if not run.holders:
                self._append(run)
                blocks = run.stop - run.start
                self.free += blocks
                self._listed += blocks

    def _append(self, run: Run) -> None:
        ring = self._ring
        last = ring.before
        run.before, run.after = last, ring
        last.after = ring.before = run

    def _evict(self, count: int) -> None:
        """Uncache `count` blocks from the front of the ring; they are handed out."""
        ring = self._ring
        while count:
            run = ring.after
            size, node = run.stop - run.start, run.node
            if size > count:
                if node is None:
                    run.stop -= count
                    return
                if len(node.copies) == 1:
                    run.stop = node.stop = run.stop - count
                    return
                self._split(node, run.stop - count)  # the piece comes to lie in front of `run`
                continue
            ring.after, run.after.before = run.after, ring
            count -= size
            if node is None:
                run.stop = run.start
                continue
            run.node = None  # no cycle stays behind for the garbage collector
            node.copies.remove(run)
            if not node.copies:
                assert node.parent is not None
                assert not node.children
                del node.parent.children[node.key]

    def _split(self, node: Node, at: int) -> None:
        """Cut `node` and all its copies, so that another node begins at block `at`."""
        tail = Node(node, node.ids, node.per_id, at, node.stop)
        tail.children = node.children
        for child in tail.children.values():
            child.parent = tail
        node.children = {tail.key: tail}
        node.stop = at
        for run in node.copies:
            piece = Run(at, run.stop, tail, run.holders)
            run.stop = at
            if run.holders:
                piece.rest, run.rest = run.rest, piece
            else:
                before = run.before
                piece.before, piece.after = before, run
                before.after = run.before = piece
            tail.copies.append(piece)
