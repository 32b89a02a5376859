"""Further APIs in front of the same chat, one file each: `messages` is Anthropic's.

They follow the converters of vLLM 0.32. The room imports `answers` and `protocol`.
"""
