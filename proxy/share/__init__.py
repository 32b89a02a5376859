"""Several proxies in front of the same backends.

In reading order: exchange (state to and from the others), wire (the message), hub (between the
workers of one machine), redis_link (between machines).

May import the driver, core, and the names of log events.
"""
