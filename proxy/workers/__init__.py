"""Several processes of one proxy: `forebay proxy --workers N`.

In reading order: serve_workers (the parent), workers (the processes), worker (one process),
workers_admin (their common admin port), worker_histories (the last minute of all workers).

May import the admin port, share, security, runtime, config and http1.
"""
