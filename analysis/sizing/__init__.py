"""Find the number of GPUs that a workload needs, by simulation: `forebay size`.

In reading order: `cli` is the command and `options` its options. `workload` is the traffic of the
users, `targets` are the latencies that they want. `guide` asks for the answer: `naive` and `floor`
bound it by formulas, `search` finds the least number, `judge` checks a number,
`binding` names the scarce resource, `workers` share the simulations. `report` prints the answer.
The room imports `kv`, `charts` and `statistics`.
"""
