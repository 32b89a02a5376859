"""An engine in real time.

In reading order: `core_loop` steps the engine and hands out its tokens, `metrics` counts, `faults`
breaks it on purpose. The room imports the engine on top and `timing`.
"""
