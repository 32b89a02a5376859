"""Files that are no run folders, read as runs.

In reading order: `rows` makes a run of rows, `proxy_logs` reads the usage ledger and the request
log of the proxy, `hdr_payload` decodes one histogram, `hlog` reads files of them, and `histograms`
makes a run of them or of a percentile distribution. The room imports `runs.run` and `statistics`.
"""
