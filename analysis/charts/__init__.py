"""Drawings, as SVG.

In reading order: `svg` has the marks, axes and scales, `panels` draws points and curves, `heat_map`
draws a table in colours, `users_and_gpus` the plot of `forebay size`. The room imports no
other part of Forebay.
"""
