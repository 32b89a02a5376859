"""Free ports of this machine."""

import random
import socket
from contextlib import ExitStack

# Below the ports that Linux gives to outgoing connections: one of those may take a port of that
# range between our look and the server's start, and a bind to every address then fails.
PORTS = range(10_000, 32_768)


def free_ports(count: int) -> list[int]:
    """Ports that are unused on every address."""
    ports: list[int] = []
    with ExitStack() as stack:
        for port in random.SystemRandom().sample(PORTS, 1_000):
            if len(ports) == count:
                return ports
            try:
                stack.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            ports.append(port)
    raise RuntimeError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")
