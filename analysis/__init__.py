"""Read runs: compare them, report them, and the studies that make and need them.

On top: `cli` has the commands `report` and `compare`.
The rooms, each of which may import the rooms above it and all other packages:

- `statistics` and `charts`: numbers and drawings that know nothing of runs.
- `score`: answers against the answers that were expected.
- `kv`: KV-cache arithmetic, the command `forebay kv`.
- `runs`: run folders and results of other tools; the command `forebay runs`.
- `experiments`: the measurement studies of `forebay experiment`.
- `compare`, `search` and `sizing`: two runs, the highest load, the number of GPUs.
- `report`: the HTML page of runs.
- `simulation`: what load tests ask of the simulator.
- `tune`: what would have been with other routers, flags and GPUs.
- `demo`: the whole toolkit on one machine.
"""
