"""Compare the simulated engine with real servers, and fit it to them.

In reading order: `measured` reads runs of real traffic and results of other tools, `proxy_log`
reads the proxy's own files, `prompt_hashes` makes the hashes of prompts, `model_names` checks that
their model is the simulated one, `evidence` knows what requests can show, `fit_run` predicts their
times and fits constants to them, `output` prints a fit, `fitting` does all of it, and `cli` is the
command. The room imports `sim` and `engine`.
"""
