"""Load generation in four steps: plan, send, results, parts. Next to them, rooms that send nothing.

More than half of this package sends nothing: `engine` is a simulated vLLM server, `sim` a fleet of
them in virtual time, `validation` compares them with real ones, and `fleet` starts real ones.

On top: `cli` is the command `forebay replay`, `runner` a replay from start to end, `part_process`
one process of a replay that has several. The rooms, each of which may import those above it:

- `clock`: the time of a run.
- `plan`: which request is due when, and where it goes.
- `send`: requests at their times, and their answers.
- `results`: measurements, the run folder, and the summary.
- `parts`: a run of the plan, from one process or several.
"""
