"""The backends as the network sees them.

In reading order: link (one backend, and choices among several), pool (all backends, and the
events of each), probes (health and /metrics), models (names of models), served_models (which
backend has which model), model_search (asks again before a model is not found), discovery (backends
that come and go), hold (requests that wait for a backend to come up), failures (the meaning of bad
responses, and a log of malformed responses), retries (their limit, and the proof that they give
against a backend), passing (a limit for requests that pass no queue), salt_support (paths on which
a cache salt is dropped).

May import http1, config, telemetry and the driver. The rooms above it import it.
"""
