"""The decisions: no clock, no socket, no file, no randomness. Every event takes `now`.

In reading order: shaper (the events of requests and backends), arrival (a new request), steps
(verbs that all events share), policy_state (the state), peers (other proxies), changes (by
operators), observe (mode observe), health (which backends take work), ordered (collections in
order), model (values in and out).

The rooms, from the top: explain (records of decisions), policy (one question a file), state (what
runs and waits), learn (what answers teach). May import the standard library and itself, downwards.
"""
