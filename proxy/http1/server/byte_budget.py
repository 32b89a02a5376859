"""Bound the memory that requests hold together, and share it among its holders.

A holder is a tenant, or without keys a client's address. It may hold at most a multiple of the
memory that it leaves free. So holders get equal parts under pressure regardless of arrival order,
and there is always room for one more. This is the dynamic threshold of switches with a shared
buffer (Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
"""

from forebay.proxy.http1 import errors

SMALL_BYTES = 64 << 10  # nearly every request is smaller
LARGE_SHARE, SMALL_SHARE = 2, 8  # a holder's bytes for each free byte, by the size of the request


class ByteBudget:
    """Counts the bytes of all requests. `status` is the HTTP status beyond the limit."""

    def __init__(self, limit: int, status: int = 429) -> None:
        self.limit = limit
        self.status = status
        self.held = 0
        self.by_holder: dict[str, int] = {}  # not 0


class RequestMemory:
    """The bytes of one request in a budget. The end of the `with` block frees them.

    Attributes:
        holder: the tenant or address that holds them; set it before the first byte is held.
        size: bytes held now.
    """

    __slots__ = ("_budget", "holder", "size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.size = 0
        self.holder = ""

    def __enter__(self) -> "RequestMemory":
        return self

    def __exit__(self, *_: object) -> None:
        if self.size:
            self._add(-self.size)

    def has_room(self, size: int) -> bool:
        """True if this request may hold `size` bytes now."""
        budget, more = self._budget, size - self.size
        if more <= 0:
            return True
        share = SMALL_SHARE if size <= SMALL_BYTES else LARGE_SHARE
        free = budget.limit - budget.held - more
        return budget.by_holder.get(self.holder, 0) + more <= share * free

    def check(self, size: int) -> None:
        """Raise ApiError if there is no room for `size` bytes now."""
        if not self.has_room(size):
            raise errors.overfull(self._budget.status)

    def reach(self, size: int) -> None:
        """Reserve more memory, up to `size` bytes. Raises ApiError if there is no room."""
        if not self.has_room(size):
            raise errors.overfull(self._budget.status)
        if size > self.size:
            self._add(size - self.size)

    def shrink(self, size: int) -> None:
        """Release memory, down to `size` bytes."""
        if size < self.size:
            self._add(size - self.size)

    def _add(self, more: int) -> None:
        budget, holder = self._budget, self.holder
        self.size += more
        budget.held += more
        held = budget.by_holder.get(holder, 0) + more
        if held:
            budget.by_holder[holder] = held
        else:
            del budget.by_holder[holder]
