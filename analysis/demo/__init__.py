"""The command `forebay demo`: a fleet without GPUs, with and without the proxy.

In reading order: `demo` is the command and simulates the outcome, `side_by_side` sends
the load, `processes` starts engines and proxies. The room may import all of `forebay.analysis`.
"""
