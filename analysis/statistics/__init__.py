"""Statistics that know nothing of runs.

In reading order: `units` writes numbers for people, `quantiles` computes percentiles,
`intervals` gives confidence intervals, `knee` finds the load from which latencies grow, `fitting`
fits lines. The room imports no other of Forebay.
"""
