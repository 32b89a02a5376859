"""Disaggregated prefill and decode: the pool that generates, and the links to it.

As with vLLM's NixlConnector and a router in front: an engine of the prefill pool computes the
prompt, and its first token is thrown away. The router then sends the request to an engine of the
decode pool. That engine pulls keys and values, computes the last token of the prompt once more, and
generates. So the client's first token comes from the decode pool.

A prompt moves over the links of both engines, one after the other. Blocks that the decode pool has
from an earlier prompt are not moved. Two things are left out: no engine keeps blocks for a prompt
that is on its way, and the router takes no time.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.served import ServedEngine
from forebay.replay.sim.engine.skipping import SkippingEngine
from forebay.traces.ground.command_line.quantities import seconds
from forebay.traces.ground.errors import InputError

_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*([GM])(bps|bit/s|b/s|B/s)")
_PREFIXES = {"G": 1e9, "M": 1e6}


class KvLink(NamedTuple):
    """The link of each engine over which keys and values move.

    It is a tuple because compiled code cannot pickle a frozen dataclass for another process.

    Attributes:
        bytes_per_s: speed in one direction.
        latency_s: added to each transfer.
    """

    bytes_per_s: float = 50e9
    latency_s: float = 0.0


def parse_link(text: str) -> KvLink:
    """Read `400Gbps`, `50GB/s` or `400Gbps+2ms` (InputError: another form)."""
    speed, _, latency = text.partition("+")
    match = _SPEED.fullmatch(speed.strip())
    try:
        latency_s = float(seconds(latency)) if latency else 0.0
    except ValueError:
        match = None
    if match is None or not float(match[1]) > 0:
        raise InputError(f"--kv-link {text}: give a speed, such as 400Gbps, 50GB/s or 400Gbps+2ms")
    bits = 1.0 if match[3] == "B/s" else 8.0
    return KvLink(float(match[1]) * _PREFIXES[match[2]] / bits, latency_s)


class DecodePool:
    """The engines that generate. A request goes to the engine with the fewest requests.

    Attributes:
        engines: the engines by name.
    """

    def __init__(
        self, engines: Mapping[str, ServedEngine], link: KvLink, bytes_per_token: int
    ) -> None:
        """Create the pool. `bytes_per_token` are the keys and values of all layers."""
        self.engines = dict(engines)
        self._link = link
        self._bytes_per_token = bytes_per_token
        self._running = dict.fromkeys(self.engines, 0)
        self._free_at: dict[str, float] = {}  # when the link of each engine of both pools is free

    def take(self, request: SimRequest, prefilled_by: str, now: float) -> str:
        """Take a request whose prompt an engine has computed, and return the chosen engine."""
        name = min(self._running, key=self._running.__getitem__)
        self._running[name] += 1
        served = self.engines[name]
        request.loaded = request.prompt_tokens - 1
        # The keys and values move once the API server has passed the request on.
        ready_at = served.receive(request, now)
        engine = served.engine
        assert isinstance(engine, SkippingEngine)
        held = engine.cached_tokens(request.ids, request.block_tokens, request.prompt_tokens)
        start = max(ready_at, self._free_at.get(name, 0.0), self._free_at.get(prefilled_by, 0.0))
        moved = self._bytes_per_token * (request.prompt_tokens - held)
        end = start + self._link.latency_s + moved / self._link.bytes_per_s
        self._free_at[name] = self._free_at[prefilled_by] = end
        served.enter(request, end)
        return name

    def ended(self, name: str) -> None:
        """Record that an engine has answered a request completely."""
        self._running[name] -= 1
