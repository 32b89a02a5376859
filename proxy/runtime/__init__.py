"""The process: its load, memory and service manager.

In reading order: turns (who uses the event loop next), load_shedding (when resources are short),
memory (how much there is), systemd (who is told).

May import core/model, core/learn, config, the errors of http1 and the names of log events.
"""
