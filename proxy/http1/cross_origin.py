"""Cross-origin requests from browsers: not answered unless the configuration lists origins."""

from collections.abc import Mapping, Sequence

PREFLIGHT_S = 600
_READABLE = (
    "x-request-id, x-forebay-queue-ms, x-forebay-bucket, retry-after, retry-after-ms, "
    "x-should-retry"
)


class Cors:
    """Says what an answer tells a browser. `origins` are exact, such as https://chat.example."""

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._origins = frozenset(origins)

    def answer(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Headers for any answer to a request with these headers."""
        if not self._origins:
            return {}
        origin = headers.get("origin", "")
        if origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _READABLE,
        }

    def preflight(self, headers: Mapping[str, str], methods: Sequence[str]) -> dict[str, str]:
        """Headers for the answer to an OPTIONS request, beside `answer`."""
        if (
            headers.get("origin", "") not in self._origins
            or "access-control-request-method" not in headers
        ):
            return {}
        return {
            "Access-Control-Allow-Methods": ", ".join(methods),
            "Access-Control-Allow-Headers": (
                "authorization, content-type, x-forebay-class, x-request-id, x-request-timeout"
            ),
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        }
