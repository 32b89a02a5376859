"""Identify tenants by signed tokens (JWT) of an identity provider, besides the keys of `security`.

In reading order: jwt_tokens (a token names a tenant), jwks (the provider's public keys, from a file
or a URL, renewed while the proxy runs).

May import config and the events of telemetry. PyJWT is an extra, imported only where it is used.
"""
