"""Find the highest load at which a server meets its targets, and prove it: `forebay search`.

In reading order: `cli` is the command, `search` chooses the loads, `bracket` narrows them, `trial`
measures a load, `evidence` decides whether it met the targets, `result` writes and draws the
outcome. The room imports `runs`, `charts` and `statistics`.
"""
