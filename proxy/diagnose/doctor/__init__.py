"""Parts of `forebay doctor`: `finding` (the result of a check), `causes` (why requests are rejected
or wait), `caches` (prefix caches), `around` (restarts, API servers and the network of clients).

May import `diagnose.scene`.
"""
