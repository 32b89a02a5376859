"""The configuration: keys, defaults, and where they are read from.

In reading order: schema (all keys), backends (keys of one backend), sections (keys of the server),
tenants (keys of tenants), checks (single values), paths (the paths that are passed on), routes
(routing policies by name), sources (files, environment, options), diff (effects of a reload),
contradictions (keys that cannot work together), advice (flags that vLLM lacks).

May import the values and the policy of core, and `traces/ground`.
"""
