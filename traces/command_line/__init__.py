"""Help, options and messages that the commands of all four packages share; nothing about traces.

It stands in this package because every other package may import it. In reading order: `messages`
writes to the standard error, `help_text` shapes the pages of `--help`, `options` turns dataclasses
into options, `quantities` reads durations and sizes, `plain_words` writes lists and numbers,
`plugins` loads entry points. It imports only `forebay.traces.errors`.
"""
