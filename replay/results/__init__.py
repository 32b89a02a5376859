"""Measurements of a run, from the exchange to the summary.

In reading order: `row` defines the facts about one request, `recorder` collects rows during a run,
`folder` writes them by `arrow_file`. `summary` sums up, `verdict` judges the client itself,
`cache_warnings` the prefix cache, `provenance` records how the run was made. `progress` shows how
the run goes, `server_metrics` samples pages of /metrics. `merge` makes one run of several,
`printed_table` prints the summary. The room imports `send`, `plan` and `clock`.
"""
