"""The HTML report of runs.

In reading order: `report` collects the parts, `tables` and `plots` make them, `page` puts them into
one file. The room imports `compare`, `runs`, `charts` and `statistics`.
"""
