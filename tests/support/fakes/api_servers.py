"""Backends whose API server takes no time, for tests with hand-written times of engines."""

from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend


def without_api_server(*shapers: Shaper | Backend) -> None:
    """Predict no time in the API servers of these shapers' backends."""
    for shaper in shapers:
        backends = [shaper] if isinstance(shaper, Backend) else shaper.backends.values()
        for backend in backends:
            backend.api_server.model.token_s = 0.0
