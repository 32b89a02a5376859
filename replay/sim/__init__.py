"""A fleet in virtual time: the live policy, simulated engines, no sockets.

In reading order: `cli` is the command `forebay simulate`, `scenario` the fleet that it describes,
`workload` and `stream` the requests. `turns` lets requests wait for answers. `fleet` is the
simulation itself. `summary` and `table` sum it up, `run_folder` keeps it. `sweep` runs many,
`capacity` finds the highest load of a fleet, `closed_loop` keeps a number of requests in flight.

- `engine` is a faster implementation of the simulated engine, which skips over steps.
- `routers` has models of other routers.

Modules on top import `routers`, which imports `engine`. All may import `forebay.replay.engine`.
"""
