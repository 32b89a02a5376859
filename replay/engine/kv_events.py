"""Collect the changes of the prefix cache as KV events of vLLM 0.32.

This module has the events and their option, `kv_publisher` sends them. A prefix hit makes no event.
The hashes are this engine's own 64-bit block hashes: chained like vLLM's, but never equal to them.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

import orjson

from forebay.replay.engine.request import EngineRequest
from forebay.traces.ground.errors import InputError

FLAG = "--kv-events-config"
MEDIUM = "GPU"


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """vLLM's KVEventsConfig, names and defaults. A value that cannot work raises InputError.

    Attributes:
        endpoint: address for events. An address with `*` or `::`, and any ipc://, is bound. The
            publisher connects to any other, so that several engines can feed one subscriber.
        replay_endpoint: address that answers subscribers that missed batches, always bound.
        buffer_steps: batches kept for the replay.
        hwm: batches queued for one slow subscriber. Further batches are dropped for it.
        max_queue_size: accepted but unused: nothing is queued in front of the socket here.
        topic: first frame of every message.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(KvEventsConfig).items():
            value, kinds = getattr(self, name), get_args(hint) or (hint,)
            # isinstance would accept a bool as an int.
            if type(value) not in kinds:
                raise InputError(f"{FLAG} {name}: {value!r} is not of type {kinds[0].__name__}")
        if self.publisher is None:
            chosen = "zmq" if self.enable_kv_cache_events else "null"
            object.__setattr__(self, "publisher", chosen)
        if self.publisher not in ("zmq", "null"):
            raise InputError(f"{FLAG} publisher: {self.publisher!r} is not zmq or null")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{FLAG} {name}: {getattr(self, name)} is not 1 or more")

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def of_rank(self, rank: int) -> "KvEventsConfig":
        """Return the addresses of a data-parallel rank: vLLM adds it to the ports of rank 0."""
        if not rank:
            return self
        replay = self.replay_endpoint
        return replace(
            self,
            endpoint=_moved("endpoint", self.endpoint, rank),
            replay_endpoint=_moved("replay_endpoint", replay, rank) if replay else None,
        )


def _moved(name: str, address: str, rank: int) -> str:
    host, _, port = address.rpartition(":")
    if not address.startswith("tcp://") or not port.isdecimal() or int(port) + rank > 65_535:
        raise InputError(
            f"{FLAG} {name}: {address}: data-parallel ranks need tcp:// and a port, with as many "
            "more above it"
        )
    return f"{host}:{int(port) + rank}"


def parse_kv_events(text: str) -> KvEventsConfig:
    """Parse the JSON object of `--kv-events-config` (InputError: not JSON, or a wrong value)."""
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{FLAG}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise InputError(f'{FLAG}: give a JSON object such as {{"enable_kv_cache_events": true}}')
    keys = [field.name for field in fields(KvEventsConfig)]
    if unknown := values.keys() - {*keys}:
        raise InputError(f"{FLAG}: no such key {min(unknown)!r}; known are {', '.join(keys)}")
    return KvEventsConfig(**values)


class KvEvents:
    """Collects the changes of the cache until `take`, as a `CacheObserver`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[dict[str, Any]] = []

    def take(self) -> list[dict[str, Any]]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stored(self, request: EngineRequest, first: int, stop: int) -> None:
        content, size = request.content, self._block_size
        if content is None:
            raise ValueError(f"{request!r}: KV events need the request's tokens")
        extra_keys: list[list[str] | None] = [None] * (stop - first)
        if content.cache_salt and not first:
            extra_keys[0] = [content.cache_salt]
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [request.hash_at(index) for index in range(first, stop)],
                "parent_block_hash": request.hash_at(first - 1) if first else None,
                "token_ids": content.token_ids(first * size, stop * size),
                "block_size": size,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": None,
                "extra_keys": extra_keys,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )

    def removed(self, block_hash: int) -> None:
        event = {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": MEDIUM}
        self._events.append({**event, "group_idx": 0})

    def cleared(self) -> None:
        self._events.append({"type": "AllBlocksCleared"})
