"""Drawings, as SVG and PNG.

In reading order: `svg` has the marks, axes and scales, `panels` draws points and curves, `heat_map`
draws a table in colours, `users_and_gpus` the plot of `forebay size`, and `files` renders
the files of a plot. The room imports the ground of traces alone.
"""
