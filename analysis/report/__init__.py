"""The HTML report of runs.

In reading order: `report` collects the parts, `tables`, `plots` and `breakdown` make them, `page`
puts them into one file. The room imports `compare`, `runs`, `charts` and `statistics`.
"""
