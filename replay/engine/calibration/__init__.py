"""Fit the constants of step times to measurements.

In reading order: `workloads` says what is measured, `play` sends it, `points` are the results,
`fit` computes the constants, `calibrate` does all of it and `output` writes the file.
Runs of real traffic are fitted in `replay/validation`, which has the commands, too. The room
imports the engine on top, `timing` and `hardware`.
"""
