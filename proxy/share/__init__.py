"""Several proxies in front of the same backends.

In reading order: exchange (state to and from the others), wire (the message), hub (between the
workers of one machine), redis_link (between machines), serve_workers (`--workers`), workers (the
processes), worker (one process), workers_admin (their common admin port), worker_histories (the
last minute of all workers).

May import the driver, config, http1 and telemetry; workers_admin and serve_workers also the admin
port.
"""
