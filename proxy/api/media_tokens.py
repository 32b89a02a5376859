"""Images, sound and video in a prompt: how many tokens they are taken for.

Their bytes say nothing of it: a model cuts what they show to a size of its own. These numbers are
from the middle of what models do. A picture of 1024 x 1024: LLaVA-1.5 (336 / 14)^2 = 576, Gemma 3
256, Qwen2-VL (1036 / 28)^2 = 1,369, Pixtral (1024 / 16)^2 = 4,096. 30 s of sound: Qwen2-Audio, 25 a
second, 750. Video: 32 frames, as vLLM samples by default, of 144 each in LLaVA-NeXT-Video.
"""

from collections.abc import Mapping
from typing import Any

IMAGE_TOKENS = 1_024
SOUND_TOKENS = 768
VIDEO_TOKENS = 4_096
LONG_BYTES = 1_024  # of a part: from here on a data: URL in it is no text

# The types of vLLM's parts; where a part names none, vLLM goes by the field of the same name.
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
    """Tokens of a part that says that it is no text; 0 of any other."""
    kind = part.get("type")
    if isinstance(kind, str):
        return _TOKENS.get(kind, 0)
    if isinstance(part.get("text"), str):
        return 0
    return next((tokens for name, tokens in _TOKENS.items() if name in part), 0)


def hidden_media_tokens(part: Mapping[str, Any], dumped: bytes) -> int:
    """Tokens of a part of a type that is not known here and holds a long data: URL; else 0."""
    if len(dumped) < LONG_BYTES or part.get("type") in _TEXT:
        return 0
    return IMAGE_TOKENS if b'"data:' in dumped else 0
