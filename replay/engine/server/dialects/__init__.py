"""Further APIs of the same chat: `messages` is Anthropic's, `responses` OpenAI's newer one.

They follow the converters of vLLM 0.32. The room imports `answers` and `protocol`.
"""
