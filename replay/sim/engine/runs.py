"""Runs of KV-cache blocks, and the radix tree that finds the runs a prompt can hit."""


class Run:
    """Neighbouring blocks of one prompt that are allocated and freed together.

    Attributes:
        start, stop: first block of the prompt, and the block after the last.
        holders: requests that use it (its reference count). With 0 it is in the free list.
        node: tree node with the same content. None for content that no other request can hit.
        rest: the part split off its end. A holder remembers where its share stops and finds the
            parts by following `rest`, so a split need not know the holders.
        before, after: neighbours in the free list.
    """

    __slots__ = ("after", "before", "holders", "node", "rest", "start", "stop")
    before: "Run"
    after: "Run"

    def __init__(self, start: int, stop: int, node: "Node | None", holders: int) -> None:
        self.start = start
        self.stop = stop
        self.node = node
        self.holders = holders
        self.rest: Run | None = None


class Node:
    """Radix-tree node: blocks start..stop of all prompts that begin like `ids`.

    Attributes:
        key: block id of its first block, its key in `parent.children`.
        per_id: engine blocks of one block id.
        copies: runs with exactly these blocks, in order of registration. Equal prompts that were
            prefilled at the same time have one each.
    """

    __slots__ = ("children", "copies", "ids", "key", "parent", "per_id", "start", "stop")

    def __init__(
        self, parent: "Node | None", ids: tuple[int, ...], per_id: int, start: int, stop: int
    ) -> None:
        self.parent = parent
        self.key = ids[start // per_id]
        self.ids = ids
        self.per_id = per_id
        self.start = start
        self.stop = stop
        self.children = _NO_CHILDREN
        self.copies: list[Run] = []


_NO_CHILDREN: dict[int, Node] = {}  # shared by all leaves, never written to


def agreed(node: Node, ids: tuple[int, ...], limit: int) -> int:
    """Return the block up to which `ids` equal the ids of `node`, at most `limit`.

    The first block is known to be equal.
    """
    stop = node.stop if node.stop < limit else limit
    per_id = node.per_id
    first, last = node.start // per_id, -(-stop // per_id)
    mine, theirs = ids, node.ids
    if mine is theirs or mine[first:last] == theirs[first:last]:
        return stop
    while mine[first] == theirs[first]:
        first += 1
    return first * per_id


def parts(first: Run, stop: int) -> list[Run]:
    """List the runs that `first` was split into since it stopped at `stop`."""
    runs, run = [first], first
    while run.stop != stop:
        assert run.rest is not None
        run = run.rest
        runs.append(run)
    return runs


def last_part(run: Run, stop: int) -> Run:
    """Return the part of a split run that ends at `stop`."""
    while run.stop != stop:
        assert run.rest is not None
        run = run.rest
    return run
