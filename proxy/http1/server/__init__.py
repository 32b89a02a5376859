"""HTTP/1.1 towards clients: from an open socket to a request whose body has been read.

In reading order: listen (sockets), server (connections and their requests), request_checks
(requests that are rejected unread), request_coding (compressed bodies), client_body (reading a
body), byte_budget (the memory of all bodies), read_turns (the order of reads), idle (connections
that are quiet), cross_origin (CORS), active_ids (ids that are in use), handover (sockets for a new
process).

May import the modules of http1 itself, and nothing of the policy.
"""
