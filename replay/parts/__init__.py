"""Send a plan, from one process or several.

In reading order: `sender` sends a plan and measures the answers, `divide` gives each part of
several its rows, `run_parts` starts the parts and merges their measurements. `ray_part` starts them
on a Ray cluster. `pool` is for other work in several processes, too. The room imports `results` and
the rooms below it.
"""
