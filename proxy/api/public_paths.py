"""The methods of each path of the public port; raw paths are compared with an allow-list."""

from collections.abc import Collection

from forebay.proxy.api.dialects import DIALECTS
from forebay.proxy.config.paths import kept_response
from forebay.proxy.http1 import errors


def methods_of(path: str, routes: Collection[str], prefix: str = "") -> tuple[str, ...]:
    """Return the methods of a path, OPTIONS aside; raises ApiError 404.

    Args:
        routes: the paths that are passed on.
        prefix: stands in front of all paths for clients.
    """
    if path in DIALECTS:
        return ("POST",)
    if path == "/health":
        return ("GET", "HEAD")
    if path in routes:
        return ("GET", "POST", "HEAD")
    _, method = kept_response(path)
    if method:
        return ("POST",) if method == "POST" else ("GET", "HEAD")
    raise errors.no_such_path(f"{prefix}{known}" for known in (*DIALECTS, *routes, "/health"))
