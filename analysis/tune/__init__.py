"""Find the vLLM flags that serve a trace best, in virtual time: `forebay tune`.

In reading order: `cli` is the command, `tune` the search over flags. The room imports the simulator
of `replay`.
"""
