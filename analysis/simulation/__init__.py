"""Answer what load tests ask of the simulator: they find it in `LAB` of `command_line/plugins`.

In reading order: `sim_target` has the engine options of `forebay search`, `sim_trials` measures its
loads in virtual time, `simulate_command` writes the command that repeats a simulated run. The room
imports `search`, `runs` and `experiments`.
"""
