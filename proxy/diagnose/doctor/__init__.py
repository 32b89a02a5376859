"""Parts of `forebay doctor`: `finding` is what a check yields, `causes` finds why requests are
rejected or wait, `caches` checks prefix caches, `around` checks restarts, API servers and the
network of clients.

May import `diagnose.scene`.
"""
