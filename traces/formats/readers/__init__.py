"""The formats of Forebay. Each module lists its formats in `FORMATS`, in the order of detection.

- `published`: public traces and Forebay's CSV, a row for each request.
- `turns`: logs of sessions, whose turns may have only the new part of the prompt.
- `agents`, `tracelab` and `mlperf`: sessions of coding agents (`kv_cache_tester` reads for
  `agents`). `client_sets`: descriptions of clients.
- `tools`: results of load generators. `servers` and `gateways`: their logs.
- `prompts`: prompts without times.

They import `forebay.traces.formats.table`, `body` and `columns`, and below.
"""
