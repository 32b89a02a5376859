"""The process: its load, memory and service manager.

In reading order: load_shedding (when resources are short), memory (how
much there is), systemd (who is told).

May import core/model, config and the names of log events.
"""
