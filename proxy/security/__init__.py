"""Decide who may send requests, and which tenant a request counts for.

In reading order: guards (all of it, replaced together), auth (a key names a tenant), keys (the keys
of tenants).

May import api/cache_salt, config and http1.
"""
