"""Runs of KV-cache blocks, and the radix tree that says which prompts can hit them."""


class Run:
    """Neighbouring blocks of one prompt that share their fate: held and freed together.

    Attributes:
        start, stop: which blocks of the prompt.
        holders: requests that hold it; with none it lies in the free list.
        node: whose content it holds; None for content no other request can hit.
        rest: the piece split off its end. A holder noted where its share stops and finds the
            pieces by following `rest`, so a split need not know the holders.
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
    """Blocks start..stop of all prompts that begin like `ids`, in a radix tree.

    Attributes:
        key: the block id with its first block, under which the parent knows it.
        per_id: engine blocks of one block id.
        copies: runs that hold exactly these blocks, first registered first: equal prompts
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


_NO_CHILDREN: dict[int, Node] = {}  # of all leaves; never written to


def agreed(node: Node, ids: tuple[int, ...], limit: int) -> int:
    """The block up to which `ids` are those of `node`, its first one given; at most `limit`."""
    stop = node.stop if node.stop < limit else limit
    per_id = node.per_id
    first, last = node.start // per_id, -(-stop // per_id)
    mine, theirs = ids, node.ids
    if mine is theirs or mine[first:last] == theirs[first:last]:
        return stop
    while mine[first] == theirs[first]:
        first += 1
    return first * per_id


def pieces(first: Run, stop: int) -> list[Run]:
    """The runs that make up `first` as it was when it stopped at `stop`."""
    found, run = [first], first
    while run.stop != stop:
        assert run.rest is not None
        run = run.rest
        found.append(run)
    return found


def last_piece(run: Run, stop: int) -> Run:
    while run.stop != stop:
        assert run.rest is not None
        run = run.rest
    return run
