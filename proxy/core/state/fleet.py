"""Who waits, for which backend, and who of them is next."""

from collections.abc import Iterable

from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import Waiting


class Queues:
    """The queues of all backends.

    Attributes:
        waiting: everyone, by request, in the order of entering.
        backends: those that somebody waits for.
        count: by bucket.
    """

    def __init__(self, buckets: Iterable[str]) -> None:
        self.waiting: dict[str, Waiting] = {}
        self.backends: dict[str, Backend] = {}
        self.count = dict.fromkeys(buckets, 0)
        self._heads: list[Waiting] | None = None  # as found last, while nobody moved

    def enter(self, waiting: Waiting, backend: Backend) -> None:
        """One more waits for this backend."""
        backend.enqueue(waiting)
        self.waiting[waiting.request.id] = waiting
        self.backends[backend.name] = backend
        self.count[waiting.bucket] += 1
        self._heads = None

    def leave(self, waiting: Waiting, backend: Backend) -> None:
        """One waits for this backend no longer."""
        del self.waiting[waiting.request.id]
        backend.dequeue(waiting)
        if not backend.queued:
            del self.backends[backend.name]
        self.count[waiting.bucket] -= 1
        self._heads = None

    def rebucket(self, buckets: Iterable[str]) -> None:
        """There are other buckets now, and nobody waits."""
        assert not self.waiting
        self.count = dict.fromkeys(buckets, 0)

    def reorder(self) -> None:
        """Nobody moved, and yet another may be next: of other tenants, on other backends."""
        self._heads = None

    def heads(self) -> list[Waiting]:
        """The heads of all queues, the most urgent first."""
        if self._heads is None:
            self._heads = sorted(
                heads_of(self.backends.values()), key=lambda w: (w.rank, w.deadline, w.order)
            )
        return self._heads

    def first_deadline(self) -> float:
        """The earliest of all who wait; somebody must."""
        queues = [queue for b in self.backends.values() for queue in b.queues.values()]
        return min(first.deadline for queue in queues if (first := queue.earliest()))


def heads_of(backends: Iterable[Backend]) -> list[Waiting]:
    """Who is next in each queue, of each class."""
    queues = [queue for b in backends for queue in b.queues.values() if queue.count]
    return [head for queue in queues for head in queue.heads()]
