"""Compare runs.

In reading order: `figures` are the numbers of one run, `compare` sets those of two runs beside each
other, `headline` puts the result into words, `limits` checks the limits of a gate, `terminal`
prints all of it. The room imports `runs` and `statistics`.
"""
