"""Read files as streams: bytes, then rows, then requests.

In reading order: `unpack` opens packed files, `containers` cuts them into rows (`columnar` for
Parquet and Arrow), `reader` turns rows into requests and reports bad ones by their line, `jsonl` is
Forebay's own format. The room imports only the shared modules on top of `forebay.traces`.
"""
