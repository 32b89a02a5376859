"""The measurement studies of `forebay experiment`. `STUDIES` is their table.

A study is a module of `studies` with a subclass of `Study`, and one line of the table. Nothing else
refers to the module.

In reading order: `cli` is the command, `study` the skeleton of all studies, `result` the folder
they write. `target` is the measured server, `server_study` the measurements of one server.
`systems` receive a load: simulated ones, and the servers of `http_system`, which chooses.
`load_stats` sums a load up, `gauges` are read meanwhile. The room imports `kv`, `charts` and
`statistics`.
"""

STUDIES = (
    "prefill:Prefill",
    "decode:Decode",
    "phases:Phases",
    "hol:Hol",
    "saturation:Saturation",
    "shared_document:SharedDocumentStudy",
    "flood:Flood",
    "kv_study:KvCache",
    "memory:Memory",
    "needle:Needle",
)
