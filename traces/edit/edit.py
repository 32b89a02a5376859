"""Change a trace on its way through a pipe: each verb turns requests into requests.

Verbs stream and keep the order of arrival. A verb that leaves requests out also removes references
to them, so that no turn waits for an answer that never arrives.
"""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from heapq import merge as merge_sorted
from itertools import islice
from random import Random
from typing import Any, Final

from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.reading.reader import SeenIds
from forebay.traces.text import shared_text

Requests = Iterable[TraceRequest]
BYTES_PER_TOKEN: Final = 4
_STEP: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: ranges of block ids of traces stay apart


def cut(
    requests: Requests,
    *,
    from_s: float = 0.0,
    to_s: float | None = None,
    first: int | None = None,
) -> Iterator[TraceRequest]:
    """Keep at most `first` requests that arrive in [from_s, to_s), counted from `from_s`."""

    def inside() -> Iterator[TraceRequest]:
        for request in requests:
            if to_s is not None and request.arrival_s >= to_s:
                return
            if request.arrival_s >= from_s:
                yield replace(request, arrival_s=round(request.arrival_s - from_s, 6))

    return whole(islice(inside(), first))


def scale(requests: Requests, speed: float) -> Iterator[TraceRequest]:
    """Divide all times by `speed`: arrivals and think times. No request is dropped."""
    for request in requests:
        think_s = None if request.think_s is None else round(request.think_s / speed, 6)
        yield replace(request, arrival_s=round(request.arrival_s / speed, 6), think_s=think_s)


def shift(requests: Requests, by_s: float) -> Iterator[TraceRequest]:
    """Move all arrivals by `by_s` seconds (InputError: an arrival before 0)."""
    for request in requests:
        arrival_s = round(request.arrival_s + by_s, 6)
        if arrival_s < 0:
            raise InputError(
                f"--shift {by_s:g}: request {request.id!r} would arrive at {arrival_s:g} s; give "
                f"{-request.arrival_s:g} or more"
            )
        yield replace(request, arrival_s=arrival_s)


def merge(traces: Sequence[Requests], *, shared: bool = False) -> Iterator[TraceRequest]:
    """Merge traces in order of arrival. All but the first get names and block ids of their own.

    Args:
        shared: equal block ids of different traces mean equal text.
    """
    parts = [
        trace if number == 0 else _renamed(trace, number, shared)
        for number, trace in enumerate(traces)
    ]
    return merge_sorted(*parts, key=lambda request: request.arrival_s)


def repeated(requests: Sequence[TraceRequest], count: int) -> list[TraceRequest]:
    """Return `count` rows: the trace, and then again with sessions and prompts of its own.

    A copy follows the one before after a mean gap. Prompts of different copies share nothing.
    """
    gap_s = requests[-1].arrival_s - requests[0].arrival_s
    gap_s += gap_s / max(1, len(requests) - 1)
    rows = list(requests[:count])
    for number in range(1, -(-count // len(requests))):
        copy = _renamed(requests[: count - len(rows)], number, shared=False)
        rows += [_own_text(row, row.arrival_s + number * gap_s, number) for row in copy]
    return rows


def _own_text(row: TraceRequest, arrival_s: float, number: int) -> TraceRequest:
    """Return the row of a copy, whose text differs from its beginning on."""
    mark = f"({number + 1}) "
    text = None if row.text is None else mark + row.text
    messages = row.messages
    if messages and isinstance(messages[0].get("content"), str):
        messages = ({**messages[0], "content": mark + messages[0]["content"]}, *messages[1:])
    elif messages:
        messages = ({"role": "system", "content": mark}, *messages)
    return replace(row, arrival_s=arrival_s, text=text, messages=messages)


def _renamed(requests: Requests, number: int, shared: bool) -> Iterator[TraceRequest]:
    def name(text: str | None) -> str | None:
        return None if text is None else f"{number + 1}/{text}"

    for request in requests:
        blocks = request.blocks
        if blocks is not None and not shared:
            blocks = tuple((block + number * _STEP) % 2**64 for block in blocks)
        yield replace(
            request,
            id=f"{number + 1}/{request.id}",
            blocks=blocks,
            session=name(request.session),
            document=name(request.document),
            parent=name(request.parent),
            waits_for=tuple(f"{number + 1}/{identity}" for identity in request.waits_for),
        )


def thin(requests: Requests, keep: float, seed: int) -> Iterator[TraceRequest]:
    """Keep a share of the sessions, each whole. A request without a session counts as a session."""
    least = int(keep * 2**64)
    return whole(request for request in requests if _hash(f"{seed}:{group(request)}") < least)


def sample(requests: Sequence[TraceRequest], count: int, seed: int) -> Iterator[TraceRequest]:
    """Keep `count` whole sessions, drawn at random (InputError: the trace has fewer)."""
    names = list(dict.fromkeys(map(group, requests)))
    if count > len(names):
        raise InputError(f"--sample {count}: the trace has {len(names)}; give fewer")
    chosen = set(Random(f"{seed}:sample").sample(names, count))
    return whole(request for request in requests if group(request) in chosen)


def group(request: TraceRequest) -> str:
    """Return the name of the group of a request: its session, or its own id."""
    return f"id {request.id}" if request.session is None else request.session


def cap(
    requests: Requests,
    *,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    context: int | None = None,
    drop: bool = False,
) -> Iterator[TraceRequest]:
    """Shorten prompts and answers to limits, or drop longer requests.

    A shortened prompt keeps its beginning, so it still shares it. With `context`, the answer keeps
    at most half of it.
    """

    def fitted(request: TraceRequest) -> TraceRequest | None:
        tokens_out = min(request.output_tokens, output_tokens or request.output_tokens)
        most = min(request.input_tokens, input_tokens or request.input_tokens)
        if context is not None and most + tokens_out > context:
            tokens_out = min(tokens_out, max(1, context // 2))
            most = min(most, max(1, context - tokens_out))
        if (most, tokens_out) == (request.input_tokens, request.output_tokens):
            return request
        if drop:
            return None
        return shortened(request, most, tokens_out)

    return whole(result for request in requests if (result := fitted(request)) is not None)


def shortened(request: TraceRequest, input_tokens: int, output_tokens: int) -> TraceRequest:
    """Return `request` with a prompt of `input_tokens`, its beginning, and a shorter answer."""
    blocks, text, messages = request.blocks, request.text, request.messages
    if input_tokens < request.input_tokens:
        if blocks is not None:
            blocks = blocks[: -(-input_tokens // request.block_tokens)]
        whole_text = shared_text(request)
        if whole_text is not None:  # a chat that is cut has no valid messages any more
            text = whole_text[: len(whole_text) * input_tokens // request.input_tokens]
            messages = None
    return replace(
        request,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        blocks=blocks,
        text=text,
        messages=messages,
    )


def anonymise(requests: Requests, salt: str | None = None) -> Iterator[TraceRequest]:
    """Replace names and text by keyed hashes. Equal beginnings stay equal.

    No text is readable. Numbers and flags of `parameters` are kept, texts and tools are not.

    Args:
        salt: the key. Without it, the key is random and not kept.
    """
    # One key for all names and texts, so that equal ones stay equal.
    key = blake2b((salt or secrets.token_hex()).encode(), digest_size=32).digest()

    def hashed(data: bytes) -> int:
        return int.from_bytes(blake2b(data, key=key, digest_size=8).digest(), "little")

    def name(kind: str, text: str | None) -> str | None:
        return None if text is None else f"{kind}-{hashed(f'{kind} {text}'.encode()):016x}"

    for request in requests:
        blocks, block_tokens = request.blocks, request.block_tokens
        # Text becomes block ids, which keep only the sharing.
        text = shared_text(request)
        if text is not None:
            blocks, block_tokens = text_blocks(text, request.input_tokens), BLOCK_TOKENS
        yield replace(
            request,
            id=str(name("r", request.id)),
            session=name("s", request.session),
            tenant=name("t", request.tenant),
            document=name("d", request.document),
            parent=name("r", request.parent),
            waits_for=tuple(str(name("r", identity)) for identity in request.waits_for),
            blocks=None
            if blocks is None
            else tuple(hashed(block.to_bytes(8, "little")) for block in blocks),
            block_tokens=block_tokens,
            text=None,
            messages=None,
            tools=None,
            parameters=_numbers(request.parameters),
        )


def _numbers(parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    numbers = {
        key: value
        for key, value in (parameters or {}).items()
        if isinstance(value, int | float | bool)
    }
    return numbers or None


def text_blocks(text: str, input_tokens: int) -> tuple[int, ...]:
    """Make a prefix-chained block id for each full or partial block of a text's tokens."""
    data = text.encode()
    count = -(-input_tokens // BLOCK_TOKENS)
    # Equal beginnings have equal blocks only if every text is cut at the same bytes.
    step = BLOCK_TOKENS * BYTES_PER_TOKEN
    chain, blocks = b"", []
    for at in range(count):
        end = (at + 1) * step if at + 1 < count else len(data)  # the last block takes the rest
        chain = blake2b(data[at * step : end], key=chain, digest_size=8).digest()
        blocks.append(int.from_bytes(chain, "little"))
    return tuple(blocks)


def whole(requests: Requests) -> Iterator[TraceRequest]:
    """Remove references to requests that are not in the trace (16 to 32 bytes a request)."""
    seen = SeenIds()
    for request in requests:
        seen.add(request.id)
        parent = request.parent if request.parent in seen else None
        waits_for = tuple(identity for identity in request.waits_for if identity in seen)
        if (parent, waits_for) == (request.parent, request.waits_for):
            yield request
            continue
        think_s = request.think_s if parent or waits_for else None
        yield replace(request, parent=parent, waits_for=waits_for, think_s=think_s)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
