"""HTTP/1.1, for both sides: server (towards clients) and client (towards backends).

In reading order: headers (which are passed on), errors (messages for clients), error_response (an
error as a response), sse (events of a stream), token_forms (events that look alike), tls
(certificates).

May import the package `traces`, and nothing of the policy.
"""
