"""Decide who may send requests, and which tenant a request counts for.

In reading order: guards (everything that a reload replaces together), auth (a key names a tenant),
keys (the keys of tenants), allowances (models, requests at once and budgets of each tenant),
spending (their use at all proxies), quota (charges for requests that pass no queue).

May import identity, cache_salt, response_ids and rejections of api, the models of backends, config,
http1, the driver and telemetry.
"""
