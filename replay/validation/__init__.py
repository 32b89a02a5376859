"""Compare the simulated engine with real servers, and fit it to them.

In reading order: `measured` reads runs of real traffic and results of other tools, `prompt_hashes`
makes the hashes of their prompts, `fit_run` predicts their times and fits constants to them. The
commands are in `cli`, `validate_cli`, `calibrate_cli` and `fit_run_cli`. The room imports `sim` and
`engine`.
"""
