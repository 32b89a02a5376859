"""Exact knowledge of prefix caches, from the KV events of the engines.

In reading order: follower (receives events), decode (applies them to an index), tokenize (which
blocks a prompt has).

May import backends, config, the driver and core/learn.
"""
