"""Choose the connection to close when there are too many: the longest idle of the busiest address.

Idle is a connection on which no request is being served: kept alive, silent, or sending a head. A
bound for each address would be simpler, but all clients may come through one proxy.
"""

import asyncio
import socket
from collections import Counter
from typing import Generic, TypeVar

ConnectionT = TypeVar("ConnectionT")


class IdleConnections(Generic[ConnectionT]):
    """Counts connections by the address of their client, and keeps the idle ones of each."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._idle: dict[str, dict[ConnectionT, None]] = {}

    def opened(self, address: str) -> dict[ConnectionT, None]:
        """Count a connection. Returns the idle connections of its address, the longest idle first.

        The connection adds itself when no request is being served on it, and removes itself when a
        request begins. This runs for every request, and a method would take as long as the rest.
        """
        self._open[address] += 1
        return self._idle.setdefault(address, {})

    def closed(self, connection: ConnectionT, address: str) -> None:
        self._idle[address].pop(connection, None)
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address], self._idle[address]

    def surplus(self, newcomer: str) -> ConnectionT | None:
        """Return the connection to close for one more of `newcomer`, or None to reject that.

        An address never loses a connection to an address that has more.
        """
        candidates = [address for address, idle in self._idle.items() if idle]
        address = max(candidates, key=self._open.__getitem__, default="")
        if not candidates or self._open[address] < self._open[newcomer]:
            return None
        return next(iter(self._idle[address]))


def client_address(transport: asyncio.BaseTransport) -> str:
    """Return the client's address. Of an IPv6 address the first half, which names a customer."""
    name = transport.get_extra_info("peername")
    host = str(name[0]) if isinstance(name, tuple) and name else ""
    if ":" not in host or host.startswith("::ffff:"):
        return host
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8].hex()
