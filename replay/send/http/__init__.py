"""An HTTP client that takes times as exactly as it can.

In reading order: `exchange` is one request and its answer, `client` sends it over a `connection`,
`answer_reader` reads the answer, with `framing` (chunks). `outcome` classifies its end, `measure`
defines the latencies. The room imports `clock`.
"""
