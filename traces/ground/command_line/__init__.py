"""Help, options and messages that the commands of all four packages share.

Nothing here is about traces. In reading order: `command` runs a command, `messages` writes to the
standard error, `help_text` shapes the pages of `--help`, `options` turns dataclasses into options,
`quantities` reads durations and sizes, `plain_words` rewrites pydantic's messages, `plugins` loads
entry points, `garbage` stops the search for cyclic objects. It imports only the ground.
"""
