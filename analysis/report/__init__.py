"""The HTML report of runs.

In reading order: `report` collects the parts and fills the template `report.html` with them,
`tables` and `plots` make them, `load_rows` computes the load over time, and `curves` compares
searches. The room imports `compare`, `search`, `runs`, `charts` and `statistics`.

A new column is not made here: its figure is in `analysis/compare/figures.py`, and its line in
`analysis/compare/lines.py`.
"""
