"""Parts of `forebay doctor`: `finding` is what a check yields, `causes` finds why requests are
rejected or wait, `caches` checks prefix caches.

May import `diagnose.scene`.
"""
