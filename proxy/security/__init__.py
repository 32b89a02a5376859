"""Decide who may send requests, and which tenant a request counts for.

In reading order: guards (all of it, replaced together), auth (a key names a tenant), keys (the keys
of tenants), quota (charges for requests that pass no queue).

May import cache_salt, response_ids and rejections of api, config, http1, the driver and telemetry.
"""
