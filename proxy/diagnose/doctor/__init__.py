"""Parts of `forebay doctor`: `finding` is what a check yields, `caches` checks prefix caches.

May import `diagnose.scene`.
"""
