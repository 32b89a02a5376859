"""The process: its event loop, memory and service manager.

In reading order: event_loop (short delays), load_shedding (when resources are short), memory (how
much there is), systemd (who is told).

May import core/model, config and the names of log events.
"""
