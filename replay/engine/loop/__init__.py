"""An engine in real time.

In reading order: `core_loop` steps the engine and hands out its tokens, `metrics` counts, `ranks`
has the engines of one server, `faults` breaks them on purpose. The room imports the engine on top
and `timing`.
"""
