"""Further forms of the same answers: `messages` is Anthropic's API, `responses` OpenAI's newer one.

`apis` lists the four APIs. They follow the converters of vLLM 0.32. The room imports `answers` and
`protocol`.
"""
