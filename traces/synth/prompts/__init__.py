"""Prompts whose answers can be scored.

In reading order: `needle` hides numbers in long texts. `zeroscrolls` reads the published tasks,
`zeroscrolls_prompts` writes and shortens their prompts, `zeroscrolls_trace` puts them in order. The
room imports `forebay.traces.synth.arrivals`, `reading` and below.
"""
