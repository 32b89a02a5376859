"""A replay over several processes.

In reading order: `divide` gives each part its rows, `run_parts` starts the parts and merges their
measurements, `ray_part` runs a part on another machine, over `ray_cluster`. `pool` is for other
work in several processes. The room imports `results` and the rooms below it.
"""
