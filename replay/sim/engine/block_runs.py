"""Model `engine.kv_blocks.pool.BlockPool` in runs of blocks, at a cost for each run.

Two facts make this exact. First, uncached free blocks always lie in front of the cached ones: they
are freed to the front, and only allocation uncaches a block. So a number stands for them. Second, a
request frees its tail before its head, so a cached prefix never has a gap: a prefix tree finds all
blocks that a prompt can hit.
"""

from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.runs import Node, Run, agreed, last_part, parts


class RunPool:
    """The blocks of one engine: free list and prefix tree.

    Attributes:
        free: free blocks. Lowering this number allocates the least valuable ones. `settle` works
            out the evictions later, before a look-up or before blocks are freed to the front of
            the list. Blocks freed to the other end do not change them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free = num_blocks - 1  # block 0 is the null block
        self._blank = self.free  # uncached free blocks, at the front of the list
        self._listed = self.free  # length of the list: blocks beyond `free` are allocated
        self._block_size = block_size
        self._roots: dict[int, Node] = {}  # by block_tokens
        # The cached part of the free list: a ring of runs, each from its end to its start.
        self._ring = ring = Run(0, 0, None, 1)
        ring.before = ring.after = ring
        self._spent = ring  # the last run that was made of private blocks of ended requests

    def hold_back(self, count: int) -> None:
        """Stop allocating `count` of the uncached blocks. A negative count reverts this."""
        self.settle()
        self._blank -= count
        self._listed -= count
        self.free -= count

    def settle(self) -> None:
        """Remove allocated blocks from the list: uncached blocks first, then by eviction."""
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
        """Find the leading blocks that are cached, at most `limit`.

        Returns their number, how many of them are free, and the nodes they are in.
        """
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

    def find(self, request: SimRequest) -> tuple[int, int, int, list[Node]]:
        """Find the blocks that a waiting request can hit.

        Returns their number, how many of them others can hit, how many are free, and the nodes of
        the blocks that others can hit.
        """
        hits = in_free = shared = 0
        path: list[Node] = []
        shareable, private = request.shareable, request.private
        if shareable:
            # The last token is always recomputed, to get the logits of the next one.
            limit = min(shareable, (request.tokens - 1) // self._block_size)
            hits, in_free, path = self.lookup(request.ids, request.block_tokens, limit)
            shared = hits
        if private is not None:
            self.settle()
            own = private.stop - private.start
            assert hits == shareable or not own
            hits += own
            in_free += own
        return hits, shared, in_free, path

    def load(self, request: SimRequest, hits: int) -> None:
        """Take blocks for keys and values that came from another engine, behind `hits` blocks."""
        block_size, loaded = self._block_size, request.loaded
        if loaded <= hits * block_size:
            return
        self.free -= -(-loaded // block_size) - hits
        full = min(request.shareable, loaded // block_size)
        if full > hits:
            self.register(request.runs, request.ids, request.block_tokens, full)

    def take(self, path: list[Node], hits: int, free: int) -> list[tuple[Run, int]]:
        """Allocate blocks that `lookup` found to one more request. Returns runs for `release`."""
        self.free -= free
        self._listed -= free
        runs = []
        for node in path:
            if hits < node.stop:
                self._split(node, hits)
            run = node.copies[0]
            if not run.holders:
                run.before.after, run.after.before = run.after, run.before
            run.holders += 1
            runs.append((run, node.stop))
        return runs

    def take_private(self, run: Run) -> None:
        """Give a preempted request its still cached private blocks back. Call `settle` first."""
        self.free -= run.stop - run.start
        self._listed -= run.stop - run.start
        run.before.after, run.after.before = run.after, run.before

    def register(
        self, runs: list[tuple[Run, int]], ids: tuple[int, ...], block_tokens: int, stop: int
    ) -> None:
        """Let later prompts hit blocks up to `stop` of the request that holds `runs`.

        These blocks are allocated already. As long as no other request shares the last run, it
        grows. So a long prefill makes one run, not one for each chunk.
        """
        if self._listed > self.free:
            self.settle()
        per_id = block_tokens // self._block_size
        # Extend the last run if this request alone holds it, else continue behind its node.
        if runs:
            first, start = runs[-1]
            run = last_part(first, start)
            node = run.node
            assert node is not None
            if run.holders == 1 and not node.children and len(node.copies) == 1:
                run.stop = node.stop = stop
                node.ids = ids  # may be longer than the ids of the request that made the node
                runs[-1] = (first, stop)
                return
        else:
            start = 0
            root = self._roots.get(block_tokens)
            if root is None:
                root = self._roots[block_tokens] = Node(None, (0,), per_id, 0, 0)
            node = root
        # Walk down the tree, with a node for each stretch that other prompts share or may share.
        while start < stop:
            key = ids[start // per_id]
            child = node.children.get(key)
            if child is None:
                child = Node(node, ids, per_id, start, stop)
                if node.children:
                    node.children[key] = child
                else:
                    node.children = {key: child}
            else:  # another request registered the same content first: a second copy
                same = agreed(child, ids, stop)
                if same < child.stop:
                    self._split(child, same)
            run = Run(start, child.stop, child, 1)
            child.copies.append(run)
            runs.append((run, child.stop))
            start, node = child.stop, child

    def release(self, runs: list[tuple[Run, int]], private: int, uncached: int) -> None:
        """Free `runs`, and as many private and uncached blocks behind them, of an ended request."""
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
        for first, stop in reversed(runs):
            if first.stop == stop and first.holders == 1:
                first.holders = 0
                self._append(first)
                blocks = stop - first.start
                self.free += blocks
                self._listed += blocks
            else:
                self._release_parts(first, stop)

    def release_for_now(
        self, runs: list[tuple[Run, int]], start: int, private: int, uncached: int
    ) -> Run | None:
        """Free the blocks of a preempted request.

        Returns the run of its private blocks, which begin at block `start`: it may hit them again.
        """
        run = None
        if private > 0:
            run = Run(start, start + private, None, 0)
            self._append(run)
            self.free += private
            self._listed += private
        self.release(runs, 0, uncached)
        return run

    def release_uncached(self, count: int) -> None:
        """Take back blocks that were never registered."""
        if self._listed > self.free:
            self.settle()
        self.free += count
        self._listed += count
        self._blank += count

    def _release_parts(self, first: Run, stop: int) -> None:
        for run in reversed(parts(first, stop)):
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
        """Uncache `count` blocks from the front of the ring, which were allocated."""
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
                self._split(node, run.stop - count)  # the new part gets in front of `run`
                continue
            ring.after, run.after.before = run.after, ring
            count -= size
            if node is None:
                run.stop = run.start
                continue
            run.node = None  # leave no cycle to the garbage collector, which is off
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
            part = Run(at, run.stop, tail, run.holders)
            run.stop = at
            if run.holders:
                part.rest, run.rest = run.rest, part
            else:
                before = run.before
                part.before, part.after = before, run
                before.after = run.before = part
            tail.copies.append(part)
