"""Estimate the tokens of images, sound and video in a prompt.

Their bytes do not tell, because a model scales media to a size of its own. These estimates are
medium values of real models. An image of 1024 x 1024: LLaVA-1.5 (336 / 14)^2 = 576, Gemma 3 256,
Qwen2-VL (1036 / 28)^2 = 1,369, Pixtral (1024 / 16)^2 = 4,096. Sound of 30 s: Qwen2-Audio 750 (25
per second). Video: 32 frames, vLLM's default, of 144 tokens each in LLaVA-NeXT-Video.
"""

from collections.abc import Mapping
from typing import Any

IMAGE_TOKENS = 1_024
SOUND_TOKENS = 768
VIDEO_TOKENS = 4_096
LONG_BYTES = 1_024  # in a part of this size a data: URL is not text

# Types of vLLM's content parts. In a part without a type vLLM looks for the field of that name.
_TOKENS = {
    "image_url": IMAGE_TOKENS,
    "input_image": IMAGE_TOKENS,
    "image_pil": IMAGE_TOKENS,
    "image_embeds": IMAGE_TOKENS,
    "input_audio": SOUND_TOKENS,
    "audio_url": SOUND_TOKENS,
    "audio_embeds": SOUND_TOKENS,
    "video_url": VIDEO_TOKENS,
    "video_embeds": VIDEO_TOKENS,
}
_TEXT = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def media_tokens(part: Mapping[str, Any]) -> int:
    """Return the estimated tokens of a part of a known media type; 0 of any other part."""
    kind = part.get("type")
    if isinstance(kind, str):
        return _TOKENS.get(kind, 0)
    if isinstance(part.get("text"), str):
        return 0
    return next((tokens for name, tokens in _TOKENS.items() if name in part), 0)


def hidden_media_tokens(part: Mapping[str, Any], dumped: bytes) -> int:
    """Return the estimated tokens of an unknown type of part with a long data: URL; else 0."""
    if len(dumped) < LONG_BYTES or part.get("type") in _TEXT:
        return 0
    return IMAGE_TOKENS if b'"data:' in dumped else 0
