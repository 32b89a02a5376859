"""Compare runs.

In reading order: `figures` are the numbers of one run and the price of its tokens, `lines` sets a
figure of two runs side by side, `compare` collects the lines of all runs, `headline` puts the
result into words, `limits` checks the limits of a gate, and `tables` writes all of it for a
terminal, as Markdown or as CSV. The room imports `runs` and `statistics`.
"""
