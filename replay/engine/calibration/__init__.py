"""Fit the constants of step times to measurements.

In reading order: `workloads` lists the steps of each measurement, `play` sends requests, `points`
reads the results, `tables` makes points of NVIDIA's op tables, `fit` computes the constants,
`calibrate` fits points, and `output` lists the shipped calibrations. Runs of real traffic are
fitted in `replay/validation`, which has the command, too. The room imports the engine on top,
`timing` and `hardware`.
"""
