"""Free ports of this machine."""

import socket


def free_ports(count: int) -> list[int]:
    """Ports that no socket listens on."""
    with AsyncExitStackOfSockets() as taken:
        return [taken.port() for _ in range(count)]


class AsyncExitStackOfSockets:
    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> "AsyncExitStackOfSockets":
        return self

    def port(self) -> int:
        self._sockets.append(one := socket.create_server(("127.0.0.1", 0)))
        return int(one.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            one.close()
