"""Plan the requests of a replay. This room sends none of them.

In reading order: `options` defines the options of a replay, `source` reads the trace, `schedule`
gives each request its time, from the trace or a `rate_profile`. `agenda` orders the turns of
sessions, `history` makes their prompts from answers. `target` reads the servers and their API keys,
`slo` the latency targets, `tasks` times the sessions of agents as wholes. `plan` makes all of it.
The room imports `traces` only.
"""
