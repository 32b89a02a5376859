"""Fit the constants of step times to measurements.

In reading order: `workloads` says what is measured, `play` sends it, `points` are the results,
`fit` computes the constants, `calibrate` does all of it and `output` writes the file.
`fit_run` fits to runs of real traffic, `prompt_hashes` is what it knows of prompts. The commands
are in `calibrate_cli`, `fit_run_cli` and `validate_cli`. The room imports the engine on top,
`timing` and `hardware`.
"""
