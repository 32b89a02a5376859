"""Durations: how long a step of the engine takes, and a request in the API server.

In reading order: `step_constants` reads the calibrated constants of a model on a GPU, `speculation`
draws how many proposals of a draft are accepted, `kernels` has the kernels of experts and
of low precision, `step_time` computes a step from all, `served` has the errors against served runs,
`roofline` is the bound by bandwidth and arithmetic, `api_server` the way in and out. The room
imports `hardware`.
"""
