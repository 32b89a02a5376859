"""Files that are no run folders, read as runs.

In reading order: `rows` makes a run of rows, `proxy_logs` reads the usage ledger and the request
log of the proxy, `hdr_payload` decodes one histogram, `hlog` and `hgrm` read files of them,
`histograms` makes a run of them, and `made_folder` writes the run folder of such a run. The room
imports `runs.run` and `statistics`.
"""
