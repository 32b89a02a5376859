"""One request from its slot on a backend to the last byte at its client.

In reading order: relay (a shaped request), unshaped (any other), attempts (one try at one backend),
backend_request (a request, and its
bytes for a backend), exchange (the answer, until it is known to be good),
stream and whole_answer (sending it on), token_chunks (chunks that need no parsing), delivery
(writing to the client), timeouts (waits that take too long), lessons (learning from responses),
kept_responses (for later requests that refer to them).

May import api, backends, http1, the driver and telemetry. It knows no API by name: it asks the
dialect.
"""
