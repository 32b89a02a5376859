"""Prompts whose answers can be scored.

In reading order: `needle` hides numbers in long texts. `zeroscrolls` reads the published tasks,
`zeroscrolls_trace` writes and shortens their prompts, and puts them in order. The room imports
`forebay.traces.synth.arrivals`, `reading` and below.
"""
