"""Statistics that know nothing of runs.

In reading order: `units` writes numbers for people, `quantiles` computes percentiles,
`quantile_intervals` and `share_intervals` give intervals, `knee` finds the load from which
latencies grow, `fitting` fits lines. The room imports no other of Forebay.
"""
