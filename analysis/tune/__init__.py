"""Play recorded traffic with another router, other flags and other GPUs: `forebay tune`.

In reading order: `cli` is the command, `traffic` reads requests and the times of their answers,
`calibrate` fits the twin to these, `otherwise` is the whole question, `setups` lists the set-ups,
`plays` plays a set-up, `figures` compares them and judges the twin, `verdict` chooses, `show` and
`page` (with `page.html`) print. The room imports the simulator of `replay`, and of the proxy the
client of its admin port.
"""
