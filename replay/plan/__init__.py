"""Plan what a replay sends: nothing here opens a connection.

In reading order: `options` are those of a replay, `source` reads the trace, `schedule` gives each
request its time, from the trace or a `rate_profile`; `due_times` applies it and `schedule_text`
prints it. `agenda` orders the turns of sessions, `history` makes their prompts from answers.
`target` are the servers, `keys` their API keys, `slo` the latencies that they should keep, `tasks`
the sessions of agents as wholes. The room imports `traces` only.
"""
