"""A replay over several processes.

In reading order: `divide` gives each part its rows, `run_parts` starts the parts and merges what
they measured, `ray_part` runs one on another machine, over `ray_cluster`. `pool` is for other work
in several processes. The room imports `results` and those below.
"""
