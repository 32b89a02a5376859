"""HTTP/1.1, for both sides: server (towards clients) and client (towards backends).

In reading order: headers (which are passed on), errors (messages for clients), error_response (an
error as a response), tls (certificates).

May import `traces/ground`, and nothing of the policy.
"""
