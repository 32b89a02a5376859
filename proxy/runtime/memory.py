"""The memory that this process may use and uses, and the part of it that is for requests."""

import ctypes
import errno
import os
from contextlib import suppress
from math import inf
from pathlib import Path

from forebay.proxy.config.sections import Limits

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
NO_LIMIT = 1 << 60  # cgroup v1 means "no limit" by a number of about this size
# For requests, where `limits.queue_bytes` is auto. In a container of 512 MiB half is left after the
# interpreter and one large body that is being parsed (measured: 60 and 70 MiB).
REQUESTS_SHARE, MOST_REQUEST_BYTES = 4, 192 << 20
M_MMAP_THRESHOLD, APART_BYTES = -3, 1 << 20
M_TRIM_THRESHOLD, FREE_BYTES = -1, 8 << 20  # free bytes at the end of the heap that malloc may keep


def memory_limit(limits: Limits) -> float:
    """Return the memory this process may use: configured, of its cgroup, or of the machine."""
    if limits.memory != "auto":
        return float(limits.memory)
    if (limit := cgroup_limit()) < inf:
        return limit
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):  # unknown on this system
        return inf


def request_bytes(limits: Limits) -> int:
    """Return the bytes that all requests may hold together."""
    if limits.queue_bytes != "auto":
        return limits.queue_bytes
    return int(min(MOST_REQUEST_BYTES, memory_limit(limits) / REQUESTS_SHARE))


def keep_large_apart() -> None:
    """Give each large object a mapping of its own, where the C library is glibc.

    A mapping grows without a copy: a body of 16 MB is copied for up to 8 ms otherwise, again and
    again while it comes. And it is given back at once. By itself glibc does so until the first
    large object is freed.

    A fixed threshold of mappings fixes the one of the heap, too: at its 128 KB, each body of
    400 KB would take 0.4 to 0.9 ms of the kernel, which clears its pages again and again.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, APART_BYTES)
        mallopt(M_TRIM_THRESHOLD, FREE_BYTES)


def cgroup_limit(root: Path = Path("/")) -> float:
    """Return the lowest limit of the process's cgroup and the cgroups around it, or inf.

    A container may see its own cgroup as the root, by a path that is not there: then the limits of
    the nearest folder that is there count.
    """
    lowest = inf
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = top / path.strip("/")
        for at in (folder, *folder.parents):
            text = _text(at / name).strip()  # "max": no limit
            if text.isdecimal() and int(text) < NO_LIMIT:
                lowest = min(lowest, float(text))
            if at == top:
                break
    return lowest


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):  # not there on this system
        return ""


def resident_bytes(last: float = 0.0) -> float:
    """Return resident memory, or 0 without /proc, or `last` without a descriptor to read it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError as error:
        return last if error.errno in NO_DESCRIPTOR else 0.0
    except (ValueError, IndexError):
        return 0.0
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
