"""Measure the simulator: its speed, and the proxy's knowledge of prefix caches.

`speed` and `prefix_bench` are scripts for developers. They may import all of `forebay.replay.sim`.
"""
