"""Parts of `forebay doctor`: `finding` (the result of a check), `servers` (their speed and errors),
`caches` (prefix caches), `around` (restarts, API servers, the proxy itself, clients), `causes` (why
requests are rejected or wait).

May import `diagnose.scene`.
"""
