"""Modules that all four packages share. They import nothing else of Forebay.

In reading order: errors (bad input), schema (the record of a request), trace_line (a request as a
line of a trace), buckets (length buckets), decoders (gzip and zstd), whole_file (files that appear
when they are complete), hlog (histograms as text), sse (events of a stream), token_forms (events
that look alike), event_loop (short delays), redaction (secrets in URLs). The room
`command_line` has help, options and messages.
"""
