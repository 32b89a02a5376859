"""The admin port: what operators and dashboards ask of a running proxy.

In reading order: port (paths and their answers), status (the JSON of /status), request_list (the
JSON of /requests), backend_facts (what each backend says about itself, for `forebay doctor`).

May import every room but share: a proxy with workers combines these answers there.
"""
