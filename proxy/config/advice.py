"""What to do where long prompts keep short ones waiting."""

from typing import Final

THRESHOLD_REMEDY: Final = (
    "start vLLM with --long-prefill-token-threshold 2048 and set long_prefill_token_threshold: 2048"
)
