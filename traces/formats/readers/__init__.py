"""The formats of Forebay. They are recognised in the order in which they stand here and in a file.

- `published`: public traces and Forebay's CSV, a row for each request.
- `turns`: logs of sessions, whose turns may have only the new part of the prompt.
- `kv_cache_tester`, `tracelab` and `mlperf`: sessions of coding agents. `client_sets`: descriptions
  of clients.
- `tools`: results of load generators. `servers`, `access_logs` and `gateways`: logs.
- `prompts`: prompts without times.

They import `forebay.traces.formats.table`, `body` and `columns`, and below.
"""
