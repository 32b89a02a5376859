"""Say what would have been with another router, other flags and other GPUs: `forebay tune`.

In reading order: `cli` is the command, `traffic` reads what was asked and what happened,
`calibrate` fits the twin to it, `otherwise` is the whole question, `setups` lists the set-ups,
`plays` plays one, `figures` compares them and judges the twin, `verdict` chooses, `show` and `page`
(with `page.html`) print. The room imports the simulator of `replay`, and of the proxy the client of
its admin port.
"""
