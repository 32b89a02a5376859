"""Make prompt text from block ids: equal ids give equal bytes, different ids never share a block.

A token is a space and a word of three letters, exactly four bytes. So the trace's own counts agree
with an estimate of bytes/4, and with an engine that cuts text into 64-byte blocks of 16 tokens. The
256 words are single tokens in the vocabularies of GPT-4 (cl100k), GPT-4o (o200k), Llama 2 and
DeepSeek, so the counts of real tokenizers are close.

The first eight words of a block spell its 64-bit id, low byte first, so two ids differ within the
first sixteen tokens with any salt. The rest is a keyed hash of the id: a new salt makes text that
no engine has cached, and every process makes the same text. It is never random, and never `hash()`.

Two limits: a last block of fewer than eight tokens spells only the low bytes of its id (it fills no
engine block by itself), and text given by the trace is sent without the salt.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any

import orjson

from forebay.traces.ground.schema import TraceRequest

BYTES_PER_TOKEN = 4

_ID_WORDS = 8
_CACHED_BLOCKS = 16_384
_CACHED_RUNS = 2_048  # runs of 4,096 tokens, as replays make them: 32 MiB
_CACHED_BLOCK_TOKENS = 1_024  # 16,384 blocks of at most 4 KiB: at most 64 MiB, 32 at 512 tokens

_TABLE = (
    "ace act add age ago aid aim air all and ant any app apt arc are arm art ash awk bag ban "
    "bar bat bay bid big bin bit bog bor bot bow box boy bud bug bus but buy cab can car cat "
    "cod cop cot cow cry cub cup cut dal day den dig dip dog dot dow dry dub due ear eat egg "
    "end era eye fan far fat fed fee few fib fig fir fit fix fly fog for fun fur gal gap gas "
    "gel gem get gig got gun gut had ham has hat hay hen hex him hip his hit hop hot how hub "
    "ice inn its jam jet job jog joy jug key kid kin lab lad lap law lay leg let lid lie lip "
    "lit log lot low mad man map mat max may men mic mix mob mom mud nap net new nod not now "
    "nun nut odd off oil old one opp our out own pad pal pan pay pen per pet pic pie pin pip "
    "pit pop pot pub pun put ram ran rap rat raw ray red rib rig rim rip rob rod row rub rug "
    "rum run sad sag sat saw say sea see set she sin six ski sky sod son sow sty sub sue sum "
    "sun tab tag tan tap tar tax ten the tie tin tip toe tom too top tub use van via vid wal "
    "war way web wed wet who why win wit won yes you zip zoo"
)
# One word for each byte value. The order is part of the format: changing it changes every prompt.
WORDS: tuple[bytes, ...] = tuple(f" {word}".encode("ascii") for word in _TABLE.split())


def block_text(block_id: int, tokens: int, salt: str) -> bytes:
    """Make the text of block `block_id`: `tokens` tokens of exactly 4 bytes each.

    A shorter block is a prefix of a longer one with the same id and salt. Raises ValueError if the
    id is outside [0, 2^64).
    """
    if tokens <= _CACHED_BLOCK_TOKENS:
        return _cached_block(block_id, tokens, salt)
    return _block(block_id, tokens, salt)


def _block(block_id: int, tokens: int, salt: str) -> bytes:
    global _made
    _made += 1
    if not 0 <= block_id < 1 << 64:
        raise ValueError(f"block id {block_id} is outside [0, 2^64)")
    spelt = block_id.to_bytes(_ID_WORDS, "little")
    return _words(spelt + _expand(b"block", spelt, tokens - _ID_WORDS, salt), tokens)


_cached_block = lru_cache(maxsize=_CACHED_BLOCKS)(_block)


@lru_cache(maxsize=_CACHED_RUNS)
def run_text(block_ids: tuple[int, ...], tokens: int, salt: str) -> bytes:
    """Make the text of several blocks of `tokens` tokens each, which prompts share."""
    global _made
    _made += 1
    return b"".join(block_text(block, tokens, salt) for block in block_ids)


_made = 0


def texts_made() -> int:
    """Return the number of texts made so far, without texts from a cache."""
    return _made


def prompt_text(request: TraceRequest, salt: str) -> str:
    """Return the prompt of `request`: its own text, or `input_tokens` words from its block ids.

    With neither, make words from its id, which no other request's prompt shares.
    """
    if request.text is not None:
        return request.text
    if request.messages is not None:
        return messages_text(request.messages)
    if request.blocks is None:
        seed = _expand(b"request", request.id.encode(), request.input_tokens, salt)
        return _words(seed, request.input_tokens).decode("ascii")
    full = request.block_tokens
    last = len(request.blocks) - 1
    tail = request.input_tokens - full * last
    if last < 0 or not 0 < tail <= full:
        raise ValueError(
            f"request {request.id!r}: {len(request.blocks)} blocks of {full} tokens do not make "
            f"{request.input_tokens} tokens"
        )
    parts = [block_text(block, full, salt) for block in islice(request.blocks, last)]
    parts.append(block_text(request.blocks[last], tail, salt))
    return b"".join(parts).decode("ascii")


def messages_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a chat that a model reads, without the model's template.

    Equal leading messages give equal leading text, so this text finds shared prefixes.
    """
    return "".join(f"{message.get('role', '')}: {_content_text(message)}\n" for message in messages)


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "".join(
            str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content
        )
    else:
        text = ""
    if calls := message.get("tool_calls"):
        text += orjson.dumps(calls, default=str).decode()
    return text


def shared_text(request: TraceRequest) -> str | None:
    """Return the text of the prompt if the trace has it: `text` or `messages`."""
    return messages_text(request.messages) if request.messages is not None else request.text


def _expand(kind: bytes, name: bytes, count: int, salt: str) -> bytes:
    """Make at least `count` bytes from `name` and `salt`. `kind` separates uses."""
    key = _key(salt)
    chunks = range(-(-max(count, 0) // 64))
    return b"".join(
        blake2b(name, key=key, person=kind, salt=index.to_bytes(8, "little")).digest()
        for index in chunks
    )


@lru_cache(maxsize=8)
def _key(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=32).digest()


def _words(choices: bytes, tokens: int) -> bytes:
    return b"".join(map(WORDS.__getitem__, choices[:tokens]))
