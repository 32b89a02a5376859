"""The time of a run.

In reading order: `clock` counts the seconds of a run, `virtual_loop` is an event loop whose time is
simulated, `spare_time` does background work where it makes no arrival late. The room imports no
other of Forebay.
"""
