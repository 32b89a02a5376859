"""Read runs, and write them in the formats of other tools.

In reading order: `run` is one run in memory, `load` reads it from a run folder, `other_tools` from
the result of another load generator, `sources` from histograms and files of the proxy. `window`
cuts a run by time. `provenance` says how a run was made, and which command repeats it.
`merge_runs` makes one run of several, `exporters` writes runs for other tools, and `otlp` sends
them to a collector. `runs_cli` is the command `forebay runs`. The room imports `statistics` and
`score`.
"""
