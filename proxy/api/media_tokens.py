"""Estimate the tokens of images, sound and video in a prompt, and distinguish them from text.

Their number of bytes does not help, because a model scales media to a size of its own. The
estimates are medium values of real models. An image of 1024 x 1024: LLaVA-1.5 (336 / 14)^2 = 576,
Gemma 3 256, Qwen2-VL (1036 / 28)^2 = 1,369, Pixtral (1024 / 16)^2 = 4,096. Sound of 30 s:
Qwen2-Audio 750 (25 per second). Video: 32 frames, vLLM's default, of 144 tokens each in
LLaVA-NeXT-Video.
"""

import re
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_128

from forebay.proxy.api.json_body import LongText

IMAGE_TOKENS = 1_024
SOUND_TOKENS = 768
VIDEO_TOKENS = 4_096
LONG_BYTES = 1_024  # a shorter string always counts as text
EMBEDS_BYTES = 10_900  # bytes of base64 for a token of `prompt_embeds`: 4,096 numbers of 16 bits

# Types of vLLM's content parts. In a part without a type vLLM looks for the field of that name.
_TOKENS = {
    "image_url": IMAGE_TOKENS,
    "input_image": IMAGE_TOKENS,
    "image_pil": IMAGE_TOKENS,
    "image": IMAGE_TOKENS,  # in /v1/messages
    "computer_screenshot": IMAGE_TOKENS,  # in /v1/responses
    "image_embeds": IMAGE_TOKENS,
    "input_audio": SOUND_TOKENS,
    "audio_url": SOUND_TOKENS,
    "audio_embeds": SOUND_TOKENS,
    "video_url": VIDEO_TOKENS,
    "video_embeds": VIDEO_TOKENS,
}
# Fields with text for the model, even if it looks like base64.
_TEXT = frozenset({
    "text", "thinking", "reasoning", "refusal", "content", "output", "code", "logs", "title",
    "stdout", "stderr",
})  # fmt: skip
# Fields with JSON that a model reads as it is: arguments of tools.
_ALL_TEXT = frozenset({"input", "arguments"})
# Under any other name a long string is text unless it is a data: URL or base64.
_BASE64 = re.compile(rb"[A-Za-z0-9+/=_-]*")
# Fields, and types of parts, that a model does not read at all.
_UNREAD = frozenset({"signature", "encrypted_content", "encrypted_index", "encrypted_stdout"})
_UNREAD_TYPES = frozenset({"redacted_thinking", "compaction"})


def media_tokens(part: Mapping[str, Any]) -> int:
    """Return the estimated tokens of a part of a known media type, 0 for any other part."""
    kind = part.get("type")
    if isinstance(kind, str):
        return _TOKENS.get(kind, 0)
    if isinstance(part.get("text"), str):
        return 0
    return next((tokens for name, tokens in _TOKENS.items() if name in part), 0)


class WithoutMedia:
    """Copies JSON with a digest in place of each medium, and estimates its tokens.

    Attributes:
        tokens: estimated tokens of all media so far.
        differs: the copy has a digest in place of a string, or holds a LongText.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.differs = False

    def copy(self, value: Any, name: str = "") -> Any:
        """Return the value of a field of this name without its media.

        Values without media are not copied.
        """
        if isinstance(value, dict):
            return self._object(value)
        if isinstance(value, list):
            return [self.copy(item, name) for item in value]
        if name not in _TEXT and is_opaque(value):
            self.tokens += 0 if name in _UNREAD else IMAGE_TOKENS
            self.differs = True
            return digest_of(value)
        self.differs = self.differs or isinstance(value, LongText)
        return value

    def _object(self, value: dict[str, Any]) -> Any:
        kind = value.get("type")
        tokens = _TOKENS.get(kind, 0) if isinstance(kind, str) else 0
        before = self.tokens
        copy = {}
        for name, field in value.items():
            self.differs = self.differs or name in _ALL_TEXT  # with any content
            copy[name] = field if name in _ALL_TEXT else self.copy(field, name)
        if tokens or kind in _UNREAD_TYPES:
            self.tokens = before + tokens
        return copy


def is_opaque(value: Any) -> bool:
    """True if a value is a long string that begins like a data: URL or like base64."""
    if isinstance(value, LongText):
        begin = value.pieces[0][:LONG_BYTES]
    elif isinstance(value, str) and len(value) >= LONG_BYTES:
        begin = value[:LONG_BYTES].encode(errors="replace")
    else:
        return False
    return begin.startswith(b"data:") or _BASE64.fullmatch(begin) is not None


def digest_of(value: str | LongText) -> str:
    """Return a short digest in place of a string that is not text."""
    digest = xxh3_128()
    for piece in value.pieces if isinstance(value, LongText) else (value.encode(),):
        digest.update(piece)
    return digest.hexdigest()[:16]
