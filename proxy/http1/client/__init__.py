"""HTTP/1.1 towards backends.

In reading order: client (a pool of connections for each backend), connection (to one backend),
dns_cache (addresses of a name), shared_gets (one question of several callers), patience (a limit
that does not count the proxy's own delay), content_coding (compressed answers), backend_errors
(faults and their names).

May import the modules of http1 itself, and nothing of the policy.
"""
