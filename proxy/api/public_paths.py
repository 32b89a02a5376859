"""The methods of each path of the public port. Raw paths are compared with an allow-list."""

from collections.abc import Collection

from forebay.proxy.api.dialects import DIALECTS
from forebay.proxy.config.paths import kept_response
from forebay.proxy.http1 import errors


def methods_of(path: str, routes: Collection[str], prefix: str = "") -> tuple[str, ...]:
    """Return the methods of a path without OPTIONS. Raises ApiError 404.

    Args:
        routes: the paths that are passed on.
        prefix: precedes all paths as clients see them.
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
    raise errors.no_such_path(f"{prefix}{public}" for public in (*DIALECTS, *routes, "/health"))
