"""Identify tenants without the keys of `security`: by signed tokens, or by client certificates.

In reading order: jwt_tokens (a token names a tenant), jwks (the provider's public keys, from a file
or a URL, renewed while the proxy runs), certificates (a name in a client's certificate names it).

May import config, the TLS of http1 and the events of telemetry. PyJWT is an extra, imported only
where it is used.
"""
