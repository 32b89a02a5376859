"""An HTTP client that takes times as exactly as it can.

In reading order: `exchange` is one request and its answer, `client` sends it over a `connection`,
`answer_reader` reads what comes back, with `framing` (chunks) and `token_forms` (events that look
alike). `outcome` says how it ended, `measure` defines the latencies. The room imports `clock`.
"""
