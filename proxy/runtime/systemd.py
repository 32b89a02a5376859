"""Report the state of the service to systemd (sd_notify: a datagram to $NOTIFY_SOCKET)."""

import os
import socket
import time


def notify(*lines: str) -> bool:
    """Send lines such as `READY=1`. Returns False if it fails, and never raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or not hasattr(socket, "AF_UNIX"):
        return False
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.sendto("\n".join(lines).encode(), address)
    except OSError:
        return False
    return True


def ready(status: str) -> None:
    notify("READY=1", f"STATUS={status}", f"MAINPID={os.getpid()}")


def reloading() -> None:
    """Report a reload. Type=notify-reload needs the monotonic time too."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def stopping(status: str) -> None:
    notify("STOPPING=1", f"STATUS={status}")
